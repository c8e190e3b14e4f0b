#pragma once

// Adam and AdamW over stretches.

#include "csrc/kernels/optimizer_rules.h"
#include "csrc/kernels/windows.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

template <typename E>
struct AdamValues {
  typename E::Storage* param;
  const typename E::Storage* grad;
  typename E::Storage* exp_avg;
  typename E::Storage* exp_avg_sq;
  typename E::Storage* max_exp_avg_sq; // amsgrad only
};

template <typename E, bool kCoupled, bool kNearGradient, bool kAmsgrad>
void adam_range(
    const AdamValues<E>& values,
    int64_t count,
    const AdamConstants<typename E::Compute>& constants) {
  const auto x = values; // copies, which no store can change
  const auto c = constants;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    AdamElement<typename E::Compute> element{
        E::load(x.param[i]), E::load(x.exp_avg[i]), E::load(x.exp_avg_sq[i]), 0};
    if constexpr (kAmsgrad) {
      element.max_exp_avg_sq = E::load(x.max_exp_avg_sq[i]);
    }
    step_element(element, E::load(x.grad[i]), c, AdamFlags{kCoupled, kNearGradient, kAmsgrad});
    if constexpr (kAmsgrad) {
      x.max_exp_avg_sq[i] = E::store(element.max_exp_avg_sq);
    }
    x.exp_avg[i] = E::store(element.exp_avg);
    x.exp_avg_sq[i] = E::store(element.exp_avg_sq);
    x.param[i] = E::store(element.param);
  }
}

// The loop for these arguments, and its constants.
template <typename E>
class AdamRule {
  using Compute = typename E::Compute;

 public:
  AdamRule(const AdamArguments& arguments, bool amsgrad)
      : constants_(adam_constants<Compute>(arguments, arguments.step)) {
    const AdamFlags is = adam_flags(arguments, amsgrad, constants_);
    range_ = amsgrad ? range<true>(is.coupled, is.near_gradient)
                     : range<false>(is.coupled, is.near_gradient);
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
