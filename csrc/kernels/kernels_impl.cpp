// The kernels' loops, compiled once for each instruction set with
// -ffp-contract=off: plain elementwise arithmetic that the compiler vectorizes,
// whose tails round like its bodies.

#include "csrc/kernels/kernels_impl.h"

#include <algorithm>
#include <cmath>

#include "csrc/kernels/elements.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {
namespace {

template <typename E>
typename E::Storage* at(void* data, int64_t index) {
  return static_cast<typename E::Storage*>(data) + index;
}

template <typename E>
const typename E::Storage* at(const void* data, int64_t index) {
  return static_cast<const typename E::Storage*>(data) + index;
}

// ---- reduction over ranks ----

constexpr int64_t kChunk = 512; // elements summed at a time, in the first cache

template <typename E>
void sum_chunk(
    typename E::Compute* sum,
    const void* const* inputs,
    int64_t input_count,
    int64_t begin,
    int64_t count) {
  const auto* first = at<E>(inputs[0], begin);
  for (int64_t i = 0; i < count; ++i) {
    sum[i] = E::load(first[i]);
  }
  for (int64_t k = 1; k < input_count; ++k) {
    const auto* next = at<E>(inputs[k], begin);
    for (int64_t i = 0; i < count; ++i) {
      sum[i] += E::load(next[i]);
    }
  }
}

template <typename E>
void reduce_range(
    void* out,
    const void* const* inputs,
    int64_t input_count,
    const void* addend,
    double divisor,
    int64_t begin,
    int64_t end) {
  using Compute = typename E::Compute;
  alignas(64) Compute sum[kChunk];
  const auto by = static_cast<Compute>(divisor);
  for (; begin < end; begin += kChunk) {
    const int64_t count = std::min(kChunk, end - begin);
    sum_chunk<E>(sum, inputs, input_count, begin, count);
    auto* to = at<E>(out, begin);
    if (addend == nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        to[i] = E::store(sum[i] / by);
      }
    } else {
      const auto* base = at<E>(addend, begin);
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) {
        to[i] = E::store(E::load(base[i]) + sum[i] / by);
      }
    }
  }
}

// ---- optimizer rules ----

template <typename E, bool decoupled>
void adam_range(
    typename E::Storage* __restrict param,
    const typename E::Storage* __restrict grad,
    typename E::Storage* __restrict exp_avg,
    typename E::Storage* __restrict exp_avg_sq,
    int64_t count,
    const AdamArguments& arguments) {
  using Compute = typename E::Compute;
  const auto step = static_cast<double>(arguments.step);
  const double correction1 = 1.0 - std::pow(arguments.beta1, step);
  const double correction2 = 1.0 - std::pow(arguments.beta2, step);
  const auto step_size = static_cast<Compute>(arguments.lr / correction1);
  const auto root = static_cast<Compute>(std::sqrt(correction2));
  const auto keep1 = static_cast<Compute>(1.0 - arguments.beta1);
  const auto beta2 = static_cast<Compute>(arguments.beta2);
  const auto keep2 = static_cast<Compute>(1.0 - arguments.beta2);
  const auto eps = static_cast<Compute>(arguments.eps);
  const auto decay = static_cast<Compute>(
      decoupled ? 1.0 - arguments.lr * arguments.weight_decay : arguments.weight_decay);
  for (int64_t i = 0; i < count; ++i) {
    Compute p = E::load(param[i]);
    Compute g = E::load(grad[i]);
    if constexpr (decoupled) {
      p = p * decay;
    } else {
      g = g + decay * p;
    }
    Compute m = E::load(exp_avg[i]);
    m = m + (g - m) * keep1;
    const Compute v = E::load(exp_avg_sq[i]) * beta2 + (g * g) * keep2;
    const Compute denominator = std::sqrt(v) / root + eps;
    exp_avg[i] = E::store(m);
    exp_avg_sq[i] = E::store(v);
    param[i] = E::store(p - step_size * m / denominator);
  }
}

template <typename E>
void sgd_range(
    typename E::Storage* __restrict param,
    const typename E::Storage* __restrict grad,
    typename E::Storage* __restrict buffer,
    int64_t count,
    const SgdArguments& arguments) {
  using Compute = typename E::Compute;
  const auto lr = static_cast<Compute>(arguments.lr);
  const auto momentum = static_cast<Compute>(arguments.momentum);
  const auto decay = static_cast<Compute>(arguments.weight_decay);
  // A first step's buffer is the gradient itself.
  const auto old = arguments.first_step ? Compute(0) : momentum;
  const auto fresh = static_cast<Compute>(arguments.first_step ? 1.0 : 1.0 - arguments.dampening);
  if (buffer == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      const Compute p = E::load(param[i]);
      param[i] = E::store(p - lr * (E::load(grad[i]) + decay * p));
    }
    return;
  }
  const bool nesterov = arguments.nesterov;
  for (int64_t i = 0; i < count; ++i) {
    const Compute p = E::load(param[i]);
    const Compute g = E::load(grad[i]) + decay * p;
    const Compute b = old * E::load(buffer[i]) + fresh * g;
    buffer[i] = E::store(b);
    param[i] = E::store(p - lr * (nesterov ? g + momentum * b : b));
  }
}

// ---- norms ----

// Sum of a block's values, by halves in a fixed order.
template <int64_t kBlock>
double sum_block(double (&values)[kBlock]) {
  for (int64_t half = kBlock / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) {
      values[i] += values[i + half];
    }
  }
  return values[0];
}

template <typename E, typename Function>
void norm_range(
    const typename E::Storage* x,
    int64_t count,
    ExactSum& sum,
    Function&& power) {
  constexpr auto kBlock = static_cast<int64_t>(64 / sizeof(typename E::Storage));
  double values[kBlock];
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    for (int64_t k = 0; k < kBlock; ++k) {
      values[k] = power(static_cast<double>(E::load(x[i + k])));
    }
    sum.add(sum_block(values));
  }
  if (i < count) {
    for (int64_t k = 0; k < kBlock; ++k) {
      values[k] = i + k < count ? power(static_cast<double>(E::load(x[i + k]))) : 0.0;
    }
    sum.add(sum_block(values));
  }
}

template <typename E>
void maximum_range(const typename E::Storage* x, int64_t count, ExactSum& sum) {
  using Compute = typename E::Compute;
  Compute largest = 0;
  Compute nan = 0; // x - x is 0, or NaN for NaN and infinities; those differ below
  for (int64_t i = 0; i < count; ++i) {
    const Compute value = std::abs(E::load(x[i]));
    largest = value > largest ? value : largest;
    nan = value == value ? nan : value;
  }
  sum.raise_maximum(static_cast<double>(nan == nan ? largest : nan));
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
  with_elements(type, [&](auto element) {
    reduce_range<decltype(element)>(out, inputs, input_count, addend, divisor, begin, end);
  });
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
  with_elements(type, [&](auto element) {
    using E = decltype(element);
    const auto run = arguments.decoupled ? &adam_range<E, true> : &adam_range<E, false>;
    run(at<E>(param, begin),
        at<E>(grad, begin),
        at<E>(exp_avg, begin),
        at<E>(exp_avg_sq, begin),
        end - begin,
        arguments);
  });
}

void sgd(
    Type type,
    void* param,
    const void* grad,
    void* momentum_buffer,
    int64_t begin,
    int64_t end,
    const SgdArguments& arguments) {
  with_elements(type, [&](auto element) {
    using E = decltype(element);
    sgd_range<E>(
        at<E>(param, begin),
        at<E>(grad, begin),
        momentum_buffer == nullptr ? nullptr : at<E>(momentum_buffer, begin),
        end - begin,
        arguments);
  });
}

void scale(Type type, void* x, double factor, int64_t begin, int64_t end) {
  with_elements(type, [&](auto element) {
    using E = decltype(element);
    const auto by = static_cast<typename E::Compute>(factor);
    auto* data = at<E>(x, 0);
    for (int64_t i = begin; i < end; ++i) {
      data[i] = E::store(E::load(data[i]) * by);
    }
  });
}

void accumulate_norm(
    Type type,
    const void* x,
    double p,
    int64_t begin,
    int64_t end,
    ExactSum& sum) {
  with_elements(type, [&](auto element) {
    using E = decltype(element);
    const auto* data = at<E>(x, begin);
    const int64_t count = end - begin;
    if (std::isinf(p)) {
      maximum_range<E>(data, count, sum);
    } else if (p == 2.0) {
      norm_range<E>(data, count, sum, [](double value) { return value * value; });
    } else if (p == 1.0) {
      norm_range<E>(data, count, sum, [](double value) { return std::abs(value); });
    } else {
      norm_range<E>(data, count, sum, [p](double value) { return std::pow(std::abs(value), p); });
    }
  });
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
