#pragma once

// The rules with one state at most over stretches: SGD and Lion.

#include <type_traits>

#include "csrc/kernels/optimizer_rules.h"
#include "csrc/kernels/windows.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

template <typename E>
struct MomentumValues {
  typename E::Storage* param;
  const typename E::Storage* grad;
  typename E::Storage* buffer; // may be null
};

// Calls function with a constant: loops over it have no branch.
template <typename Function>
void with_constant(bool value, const Function& function) {
  if (value) {
    function(std::true_type{});
  } else {
    function(std::false_type{});
  }
}

// step(element, gradient) changes an element of what has a buffer.
template <typename E, typename Step>
void momentum_range(const MomentumValues<E>& values, int64_t count, const Step& step) {
  const auto x = values; // a copy, which no store can change
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    MomentumElement<typename E::Compute> element{E::load(x.param[i]), E::load(x.buffer[i])};
    step(element, E::load(x.grad[i]));
    x.buffer[i] = E::store(element.buffer);
    x.param[i] = E::store(element.param);
  }
}

template <typename E, typename Step>
void range_without_buffer(const MomentumValues<E>& values, int64_t count, const Step& step) {
  const auto x = values;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    MomentumElement<typename E::Compute> element{E::load(x.param[i]), 0};
    step(element, E::load(x.grad[i]));
    x.param[i] = E::store(element.param);
  }
}

template <typename E>
void apply(const SgdArguments& arguments, const MomentumValues<E>& values, int64_t count) {
  const auto c = sgd_constants<typename E::Compute>(arguments);
  with_constant(arguments.weight_decay != 0.0, [&](auto decays) {
    if (values.buffer == nullptr) {
      range_without_buffer<E>(values, count, [c](auto& element, auto gradient) {
        step_element(element, gradient, c, SgdFlags{decltype(decays)::value, false, false, false});
      });
      return;
    }
    with_constant(arguments.first_step, [&](auto first) {
      with_constant(arguments.nesterov, [&](auto nesterov) {
        momentum_range<E>(values, count, [c](auto& element, auto gradient) {
          constexpr SgdFlags kFlags{
              decltype(decays)::value, true, decltype(first)::value, decltype(nesterov)::value};
          step_element(element, gradient, c, kFlags);
        });
      });
    });
  });
}

template <typename E>
void apply(const LionArguments& arguments, const MomentumValues<E>& values, int64_t count) {
  const auto c = lion_constants<typename E::Compute>(arguments);
  momentum_range<E>(
      values, count, [c](auto& element, auto gradient) { step_element(element, gradient, c); });
}

struct MomentumBuffers {
  void* param;
  Type grad_type;
  const void* grad;
  void* buffer; // may be null
  Copy copy;
};

// All of one type.
template <typename E, typename Arguments>
void momentum_elements(
    E,
    const MomentumBuffers& x,
    int64_t begin,
    int64_t end,
    const Arguments& arguments) {
  auto* const buffer = x.buffer == nullptr ? nullptr : at<E>(x.buffer, begin);
  const MomentumValues<E> values{at<E>(x.param, begin), at<E>(x.grad, begin), buffer};
  apply(arguments, values, end - begin);
}

// Any types but fp64, by chunks of fp32.
template <typename Arguments>
void momentum_chunks(
    Type type,
    const MomentumBuffers& x,
    int64_t begin,
    int64_t end,
    const Arguments& arguments) {
  Window param(type, x.param);
  Window buffer(type, x.buffer);
  Chunk gradient;
  for_chunks(begin, end, [&](int64_t first, int64_t count) {
    float* const values = param.open(first, count);
    const float* const grad = view_floats(x.grad_type, x.grad, first, count, gradient);
    apply(arguments, MomentumValues<Float32>{values, grad, buffer.open(first, count)}, count);
    write_copy(x.copy, values, first, count);
    param.close(first, count);
    buffer.close(first, count);
  });
}

template <typename Arguments>
void momentum_step(
    Type type,
    const MomentumBuffers& x,
    int64_t begin,
    int64_t end,
    const Arguments& arguments) {
  const bool direct = with_direct_elements(type, x.grad_type, x.copy, [&](auto element) {
    momentum_elements(element, x, begin, end, arguments);
  });
  if (!direct) {
    momentum_chunks(type, x, begin, end, arguments);
  }
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
