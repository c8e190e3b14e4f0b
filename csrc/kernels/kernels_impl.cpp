// The kernels' entry points, compiled once for each instruction set with
// -ffp-contract=off: plain elementwise arithmetic that the compiler vectorizes,
// whose tails round like its bodies. The loops are in the headers by topic.

#include "csrc/kernels/kernels_impl.h"

#include <cmath>

#include "csrc/kernels/elements.h"
#include "csrc/kernels/half_chunks.h"
#include "csrc/kernels/norm_loops.h"
#include "csrc/kernels/optimizer_loops.h"
#include "csrc/kernels/reduce_loops.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {
namespace {

template <typename E>
void scale_elements(E, typename E::Storage* x, double factor, int64_t count) {
  const auto by = static_cast<typename E::Compute>(factor);
  for (int64_t i = 0; i < count; ++i) {
    x[i] = E::store(E::load(x[i]) * by);
  }
}

void scale_elements(Float16, uint16_t* x, double factor, int64_t count) {
  Chunk chunk;
  for_chunks(count, [&](int64_t first, int64_t length) {
    widen(x + first, chunk.values, length);
    scale_elements(Float32{}, chunk.values, factor, length);
    narrow(chunk.values, x + first, length);
  });
}

} // namespace

void reduce_ranks(
    Type type,
    void* out,
    const void* const* inputs,
    int64_t input_count,
    const void* addend,
    double divisor,
    int64_t begin,
    int64_t end) {
  const ReduceTask task{out, inputs, input_count, addend, divisor};
  with_elements(type, [&](auto element) { reduce_range(element, task, begin, end); });
}

void adam(
    Type type,
    void* param,
    const void* grad,
    void* exp_avg,
    void* exp_avg_sq,
    int64_t begin,
    int64_t end,
    const AdamArguments& arguments) {
  const AdamTask task{param, grad, exp_avg, exp_avg_sq};
  with_elements(type, [&](auto element) { adam_elements(element, task, begin, end, arguments); });
}

void sgd(
    Type type,
    void* param,
    const void* grad,
    void* momentum_buffer,
    int64_t begin,
    int64_t end,
    const SgdArguments& arguments) {
  const SgdTask task{param, grad, momentum_buffer};
  with_elements(type, [&](auto element) { sgd_elements(element, task, begin, end, arguments); });
}

void scale(Type type, void* x, double factor, int64_t begin, int64_t end) {
  with_elements(type, [&](auto element) {
    scale_elements(element, at<decltype(element)>(x, begin), factor, end - begin);
  });
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
