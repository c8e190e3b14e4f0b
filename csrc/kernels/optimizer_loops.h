#pragma once

// Adam's and SGD's elementwise rules, in the order of operations of torch.optim.
// Hyperparameters are combined in fp64 and rounded once to the compute type; fp16
// runs the fp32 loops by chunks.

#include <cmath>

#include "csrc/kernels/half_chunks.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

template <typename Compute>
struct AdamConstants {
  explicit AdamConstants(const AdamArguments& arguments) {
    const auto step = static_cast<double>(arguments.step);
    const double correction1 = 1.0 - std::pow(arguments.beta1, step);
    const double correction2 = 1.0 - std::pow(arguments.beta2, step);
    step_size = static_cast<Compute>(arguments.lr / correction1);
    root = static_cast<Compute>(std::sqrt(correction2));
    keep1 = static_cast<Compute>(1.0 - arguments.beta1);
    beta2 = static_cast<Compute>(arguments.beta2);
    keep2 = static_cast<Compute>(1.0 - arguments.beta2);
    eps = static_cast<Compute>(arguments.eps);
    factor = static_cast<Compute>(1.0 - arguments.lr * arguments.weight_decay);
    decay = static_cast<Compute>(arguments.weight_decay);
  }

  Compute step_size;
  Compute root;
  Compute keep1;
  Compute beta2;
  Compute keep2;
  Compute eps;
  Compute factor; // of the parameter, decoupled
  Compute decay; // added to the gradient, coupled
};

// kNearGradient (beta1 up to 0.5): the first moment is taken from the gradient's
// end, so that beta1 = 0 gives the gradient itself.
template <typename E, bool kCoupled, bool kNearGradient>
void adam_range(
    typename E::Storage* __restrict param,
    const typename E::Storage* __restrict grad,
    typename E::Storage* __restrict exp_avg,
    typename E::Storage* __restrict exp_avg_sq,
    int64_t count,
    const AdamConstants<typename E::Compute>& constants) {
  using Compute = typename E::Compute;
  const auto c = constants; // a copy, which no store can change
  for (int64_t i = 0; i < count; ++i) {
    Compute p = E::load(param[i]);
    Compute g = E::load(grad[i]);
    if constexpr (kCoupled) {
      g = g + c.decay * p;
    } else {
      p = p * c.factor;
    }
    Compute m = E::load(exp_avg[i]);
    if constexpr (kNearGradient) {
      m = g - (g - m) * (Compute(1) - c.keep1);
    } else {
      m = m + (g - m) * c.keep1;
    }
    // keep2 first: the square alone may overflow.
    const Compute v = E::load(exp_avg_sq[i]) * c.beta2 + c.keep2 * g * g;
    const Compute denominator = std::sqrt(v) / c.root + c.eps;
    exp_avg[i] = E::store(m);
    exp_avg_sq[i] = E::store(v);
    param[i] = E::store(p - c.step_size * m / denominator);
  }
}

// The loop for these arguments, and its constants.
template <typename E>
class AdamRule {
 public:
  explicit AdamRule(const AdamArguments& arguments) : constants_(arguments) {
    const bool near_gradient = !(constants_.keep1 < 0.5F);
    const bool decays = arguments.weight_decay != 0.0;
    if (decays && !arguments.decoupled) {
      range_ = near_gradient ? &adam_range<E, true, true> : &adam_range<E, true, false>;
    } else {
      range_ = near_gradient ? &adam_range<E, false, true> : &adam_range<E, false, false>;
      constants_.factor = decays ? constants_.factor : 1;
    }
  }

  void apply(
      typename E::Storage* param,
      const typename E::Storage* grad,
      typename E::Storage* exp_avg,
      typename E::Storage* exp_avg_sq,
      int64_t count) const {
    range_(param, grad, exp_avg, exp_avg_sq, count, constants_);
  }

 private:
  AdamConstants<typename E::Compute> constants_;
  decltype(&adam_range<E, true, true>) range_;
};

struct AdamTask {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
};

template <typename E>
void adam_elements(
    E,
    const AdamTask& task,
    int64_t begin,
    int64_t end,
    const AdamArguments& arguments) {
  AdamRule<E>(arguments).apply(
      at<E>(task.param, begin),
      at<E>(task.grad, begin),
      at<E>(task.exp_avg, begin),
      at<E>(task.exp_avg_sq, begin),
      end - begin);
}

inline void adam_elements(
    Float16,
    const AdamTask& task,
    int64_t begin,
    int64_t end,
    const AdamArguments& arguments) {
  const AdamRule<Float32> rule(arguments);
  Chunk param;
  Chunk grad;
  Chunk exp_avg;
  Chunk exp_avg_sq;
  for_chunks(end - begin, [&](int64_t first, int64_t count) {
    first += begin;
    widen(at<Float16>(task.param, first), param.values, count);
    widen(at<Float16>(task.grad, first), grad.values, count);
    widen(at<Float16>(task.exp_avg, first), exp_avg.values, count);
    widen(at<Float16>(task.exp_avg_sq, first), exp_avg_sq.values, count);
    rule.apply(param.values, grad.values, exp_avg.values, exp_avg_sq.values, count);
    narrow(param.values, at<Float16>(task.param, first), count);
    narrow(exp_avg.values, at<Float16>(task.exp_avg, first), count);
    narrow(exp_avg_sq.values, at<Float16>(task.exp_avg_sq, first), count);
  });
}

struct SgdTask {
  void* param;
  const void* grad;
  void* momentum_buffer; // may be null
};

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
  const auto fresh = static_cast<Compute>(1.0 - arguments.dampening);
  const auto decay = static_cast<Compute>(arguments.weight_decay);
  const bool decays = arguments.weight_decay != 0.0;
  const bool first_step = arguments.first_step;
  const bool nesterov = arguments.nesterov;
  if (buffer == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      const Compute p = E::load(param[i]);
      const Compute g = E::load(grad[i]);
      param[i] = E::store(p - lr * (decays ? g + decay * p : g));
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const Compute p = E::load(param[i]);
    const Compute raw = E::load(grad[i]);
    const Compute g = decays ? raw + decay * p : raw;
    const Compute moved = momentum * E::load(buffer[i]) + fresh * g;
    const Compute b = first_step ? g : moved;
    buffer[i] = E::store(b);
    param[i] = E::store(p - lr * (nesterov ? g + momentum * b : b));
  }
}

template <typename E>
void sgd_elements(
    E,
    const SgdTask& task,
    int64_t begin,
    int64_t end,
    const SgdArguments& arguments) {
  sgd_range<E>(
      at<E>(task.param, begin),
      at<E>(task.grad, begin),
      task.momentum_buffer == nullptr ? nullptr : at<E>(task.momentum_buffer, begin),
      end - begin,
      arguments);
}

inline void sgd_elements(
    Float16,
    const SgdTask& task,
    int64_t begin,
    int64_t end,
    const SgdArguments& arguments) {
  Chunk param;
  Chunk grad;
  Chunk buffer;
  const bool buffered = task.momentum_buffer != nullptr;
  const SgdTask chunk{param.values, grad.values, buffered ? buffer.values : nullptr};
  for_chunks(end - begin, [&](int64_t first, int64_t count) {
    first += begin;
    widen(at<Float16>(task.param, first), param.values, count);
    widen(at<Float16>(task.grad, first), grad.values, count);
    if (buffered) {
      widen(at<Float16>(task.momentum_buffer, first), buffer.values, count);
    }
    sgd_elements(Float32{}, chunk, 0, count, arguments);
    narrow(param.values, at<Float16>(task.param, first), count);
    if (buffered) {
      narrow(buffer.values, at<Float16>(task.momentum_buffer, first), count);
    }
  });
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
