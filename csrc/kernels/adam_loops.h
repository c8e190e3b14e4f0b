#pragma once

// Adam's and AdamW's elementwise rule, in the order of operations of torch.optim.
// Hyperparameters are combined in fp64 and rounded once to the compute type.

#include <cmath>

#include "csrc/kernels/windows.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

template <typename Compute>
struct AdamConstants {
  explicit AdamConstants(const AdamArguments& arguments) {
    const auto step = static_cast<double>(arguments.step);
    const double correction1 = 1.0 - std::pow(arguments.beta1, step);
    const double correction2 = 1.0 - std::pow(arguments.beta2, step);
    step_size = static_cast<Compute>(arguments.lr / correction1);
    inverse_root = static_cast<Compute>(1.0 / std::sqrt(correction2));
    keep1 = static_cast<Compute>(1.0 - arguments.beta1);
    beta2 = static_cast<Compute>(arguments.beta2);
    keep2 = static_cast<Compute>(1.0 - arguments.beta2);
    eps = static_cast<Compute>(arguments.eps);
    factor = static_cast<Compute>(1.0 - arguments.lr * arguments.weight_decay);
    decay = static_cast<Compute>(arguments.weight_decay);
    sign = static_cast<Compute>(arguments.maximize ? -1 : 1);
  }

  Compute step_size;
  Compute inverse_root; // of the second bias correction
  Compute keep1;
  Compute beta2;
  Compute keep2;
  Compute eps;
  Compute factor; // of the parameter, decoupled
  Compute decay; // added to the gradient, coupled
  Compute sign; // of the gradient
};

template <typename E>
struct AdamValues {
  typename E::Storage* param;
  const typename E::Storage* grad;
  typename E::Storage* exp_avg;
  typename E::Storage* exp_avg_sq;
  typename E::Storage* max_exp_avg_sq; // amsgrad only
};

// kNearGradient (beta1 up to 0.5): the first moment is taken from the gradient's
// end, so that beta1 = 0 gives the gradient itself.
template <typename E, bool kCoupled, bool kNearGradient, bool kAmsgrad>
void adam_range(
    const AdamValues<E>& values,
    int64_t count,
    const AdamConstants<typename E::Compute>& constants) {
  using Compute = typename E::Compute;
  const auto x = values; // copies, which no store can change
  const auto c = constants;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    Compute p = E::load(x.param[i]);
    Compute g = E::load(x.grad[i]) * c.sign;
    if constexpr (kCoupled) {
      g = g + c.decay * p;
    } else {
      p = p * c.factor;
    }
    Compute m = E::load(x.exp_avg[i]);
    if constexpr (kNearGradient) {
      m = g - (g - m) * (Compute(1) - c.keep1);
    } else {
      m = m + (g - m) * c.keep1;
    }
    // keep2 first: the square alone may overflow.
    const Compute v = E::load(x.exp_avg_sq[i]) * c.beta2 + c.keep2 * g * g;
    Compute largest = v;
    if constexpr (kAmsgrad) {
      const Compute before = E::load(x.max_exp_avg_sq[i]);
      const bool stays = (before >= v) | (before != before); // a NaN of either is kept
      largest = stays ? before : v;
      x.max_exp_avg_sq[i] = E::store(largest);
    }
    const Compute denominator = std::sqrt(largest) * c.inverse_root + c.eps;
    x.exp_avg[i] = E::store(m);
    x.exp_avg_sq[i] = E::store(v);
    x.param[i] = E::store(p - c.step_size * m / denominator);
  }
}

// The loop for these arguments, and its constants.
template <typename E>
class AdamRule {
  using Compute = typename E::Compute;

 public:
  AdamRule(const AdamArguments& arguments, bool amsgrad) : constants_(arguments) {
    const bool near_gradient = !(constants_.keep1 < Compute(0.5));
    const bool decays = arguments.weight_decay != 0.0;
    const bool coupled = decays && !arguments.decoupled;
    if (!decays) {
      constants_.factor = 1;
    }
    range_ = amsgrad ? range<true>(coupled, near_gradient) : range<false>(coupled, near_gradient);
  }

  void apply(const AdamValues<E>& values, int64_t count) const {
    range_(values, count, constants_);
  }

 private:
  using Range = decltype(&adam_range<E, true, true, true>);

  template <bool kAmsgrad>
  static Range range(bool coupled, bool near_gradient) {
    if (coupled) {
      return near_gradient ? &adam_range<E, true, true, kAmsgrad>
                           : &adam_range<E, true, false, kAmsgrad>;
    }
    return near_gradient ? &adam_range<E, false, true, kAmsgrad>
                         : &adam_range<E, false, false, kAmsgrad>;
  }

  AdamConstants<Compute> constants_;
  Range range_;
};

// All of one type.
template <typename E>
void adam_elements(
    E,
    const AdamBuffers& x,
    int64_t begin,
    int64_t end,
    const AdamArguments& arguments) {
  const bool amsgrad = x.max_exp_avg_sq != nullptr;
  AdamRule<E>(arguments, amsgrad)
      .apply(
          {at<E>(x.param, begin),
           at<E>(x.grad, begin),
           at<E>(x.exp_avg, begin),
           at<E>(x.exp_avg_sq, begin),
           amsgrad ? at<E>(x.max_exp_avg_sq, begin) : nullptr},
          end - begin);
}

// Any types but fp64, by chunks of fp32.
inline void adam_chunks(
    Type type,
    const AdamBuffers& x,
    int64_t begin,
    int64_t end,
    const AdamArguments& arguments) {
  const AdamRule<Float32> rule(arguments, x.max_exp_avg_sq != nullptr);
  Window param(type, x.param);
  Window exp_avg(type, x.exp_avg);
  Window exp_avg_sq(type, x.exp_avg_sq);
  Window max_exp_avg_sq(type, x.max_exp_avg_sq);
  Chunk gradient;
  for_chunks(begin, end, [&](int64_t first, int64_t count) {
    float* const values = param.open(first, count);
    rule.apply(
        {values,
         view_floats(x.grad_type, x.grad, first, count, gradient),
         exp_avg.open(first, count),
         exp_avg_sq.open(first, count),
         max_exp_avg_sq.open(first, count)},
        count);
    write_copy(x.copy, values, first, count);
    param.close(first, count);
    exp_avg.close(first, count);
    exp_avg_sq.close(first, count);
    max_exp_avg_sq.close(first, count);
  });
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
