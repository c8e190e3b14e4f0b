// The kernels' entry points, compiled once for each instruction set with
// -ffp-contract=off: plain elementwise arithmetic that the compiler vectorizes,
// whose tails round like its bodies. The loops are in the headers by topic.

#include "csrc/kernels/kernels_impl.h"

#include <cmath>

#include "csrc/kernels/adam_loops.h"
#include "csrc/kernels/element_loops.h"
#include "csrc/kernels/momentum_loops.h"
#include "csrc/kernels/norm_loops.h"
#include "csrc/kernels/reduce_loops.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

void reduce_ranks(const Reduction& reduction, int64_t begin, int64_t end) {
  switch (reduction.type) {
  case Type::f32:
    return reduce_range<Float32, Float32>(reduction, begin, end);
  case Type::f64:
    return reduce_range<Float64, Float64>(reduction, begin, end);
  case Type::bf16:
    return reduction.out_type == Type::f32
        ? reduce_range<BFloat16, Float32>(reduction, begin, end)
        : reduce_range<BFloat16, BFloat16>(reduction, begin, end);
  case Type::f16:
    return reduce_halves(reduction, begin, end);
  }
}

void adam(
    Type type,
    const AdamBuffers& buffers,
    int64_t begin,
    int64_t end,
    const AdamArguments& arguments) {
  const bool direct =
      with_direct_elements(type, buffers.grad_type, buffers.copy, [&](auto element) {
        adam_elements(element, buffers, begin, end, arguments);
      });
  if (!direct) {
    adam_chunks(type, buffers, begin, end, arguments);
  }
}

void sgd(
    Type type,
    const SgdBuffers& buffers,
    int64_t begin,
    int64_t end,
    const SgdArguments& arguments) {
  const MomentumBuffers x{
      buffers.param, buffers.grad_type, buffers.grad, buffers.momentum_buffer, buffers.copy};
  momentum_step(type, x, begin, end, arguments);
}

void lion(
    Type type,
    const LionBuffers& buffers,
    int64_t begin,
    int64_t end,
    const LionArguments& arguments) {
  const MomentumBuffers x{
      buffers.param, buffers.grad_type, buffers.grad, buffers.exp_avg, buffers.copy};
  momentum_step(type, x, begin, end, arguments);
}

void scale(Type type, void* x, double factor, int64_t begin, int64_t end) {
  change_elements(type, x, begin, end, [factor](auto value) {
    return value * static_cast<decltype(value)>(factor);
  });
}

void clamp(Type type, void* x, double low, double high, int64_t begin, int64_t end) {
  change_elements(type, x, begin, end, [low, high](auto value) {
    using Compute = decltype(value);
    return clamped(value, static_cast<Compute>(low), static_cast<Compute>(high));
  });
}

void convert(Type from_type, const void* from, Type to_type, void* to, int64_t begin, int64_t end) {
  if (from_type == to_type) {
    with_elements(to_type, [&](auto element) {
      using E = decltype(element);
      std::memcpy(
          at<E>(to, begin), at<E>(from, begin), (end - begin) * sizeof(typename E::Storage));
    });
  } else if (to_type == Type::f64) {
    widen_to_doubles(from_type, from, at<Float64>(to, 0), begin, end);
  } else {
    convert_elements(from_type, from, to_type, to, begin, end);
  }
}

void accumulate(Type from_type, const void* from, float* to, int64_t begin, int64_t end) {
  Chunk chunk;
  for_chunks(begin, end, [&](int64_t first, int64_t count) {
    const float* const values = view_floats(from_type, from, first, count, chunk);
    float* const sum = to + first;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      sum[i] += values[i];
    }
  });
}

void follow(Type from_type, const void* from, float* to, int64_t begin, int64_t end) {
  Chunk given;
  Chunk held;
  alignas(64) double room[kChunk]; // of any type
  for_chunks(begin, end, [&](int64_t first, int64_t count) {
    const float* const values = view_floats(from_type, from, first, count, given);
    float* const target = to + first;
    write_floats(from_type, target, room, 0, count);
    const float* const rounded = view_floats(from_type, room, 0, count, held);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      target[i] = followed(target[i], rounded[i], values[i]);
    }
  });
}

int64_t first_nonfinite(Type type, const void* x, int64_t begin, int64_t end) {
  int64_t found = end;
  with_elements(type, [&](auto element) {
    using E = decltype(element);
    found = find_nonfinite<E>(at<E>(x, 0), begin, end);
  });
  return found;
}

void accumulate_norm(
    Type type,
    const void* x,
    double p,
    int64_t begin,
    int64_t end,
    ExactSum& sum) {
  const int64_t count = end - begin;
  with_elements(type, [&](auto element) {
    using E = decltype(element);
    const auto* data = at<E>(x, begin);
    if (std::isinf(p)) {
      maximum_range<E>(data, count, sum);
    } else if (p == 2.0) {
      norm_elements(element, data, count, [](double value) { return value * value; }, sum);
    } else if (p == 1.0) {
      norm_elements(element, data, count, [](double value) { return std::abs(value); }, sum);
    } else {
      const auto power = [p](double value) { return std::pow(std::abs(value), p); };
      norm_elements(element, data, count, power, sum);
    }
  });
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
