#pragma once

// The rules with one state at most: SGD in the order of operations of torch.optim,
// and Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms",
// algorithm 2). Hyperparameters are rounded once to the compute type.

#include <type_traits>

#include "csrc/kernels/windows.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

template <typename E>
struct MomentumValues {
  typename E::Storage* param;
  const typename E::Storage* grad;
  typename E::Storage* buffer; // may be null
};

template <typename Compute>
struct SgdConstants {
  explicit SgdConstants(const SgdArguments& arguments)
      : lr(static_cast<Compute>(arguments.lr)),
        momentum(static_cast<Compute>(arguments.momentum)),
        fresh(static_cast<Compute>(1.0 - arguments.dampening)),
        decay(static_cast<Compute>(arguments.weight_decay)),
        sign(static_cast<Compute>(arguments.maximize ? -1 : 1)) {}

  Compute lr;
  Compute momentum;
  Compute fresh; // part of the gradient
  Compute decay;
  Compute sign; // of the gradient
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

template <typename E, bool kDecays, bool kFirst, bool kNesterov>
void sgd_range(
    const MomentumValues<E>& values,
    int64_t count,
    const SgdConstants<typename E::Compute>& constants) {
  using Compute = typename E::Compute;
  const auto x = values; // copies, which no store can change
  const auto c = constants;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const Compute p = E::load(x.param[i]);
    Compute g = E::load(x.grad[i]) * c.sign;
    if constexpr (kDecays) {
      g = g + c.decay * p;
    }
    Compute b = g;
    if constexpr (!kFirst) {
      b = c.momentum * E::load(x.buffer[i]) + c.fresh * g;
    }
    x.buffer[i] = E::store(b);
    x.param[i] = E::store(p - c.lr * (kNesterov ? g + c.momentum * b : b));
  }
}

template <typename E, bool kDecays>
void sgd_range_without_buffer(
    const MomentumValues<E>& values,
    int64_t count,
    const SgdConstants<typename E::Compute>& constants) {
  const auto x = values;
  const auto c = constants;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const auto p = E::load(x.param[i]);
    const auto g = E::load(x.grad[i]) * c.sign;
    x.param[i] = E::store(p - c.lr * (kDecays ? g + c.decay * p : g));
  }
}

template <typename E>
void apply(const SgdArguments& arguments, const MomentumValues<E>& values, int64_t count) {
  const SgdConstants<typename E::Compute> constants(arguments);
  with_constant(arguments.weight_decay != 0.0, [&](auto decays) {
    if (values.buffer == nullptr) {
      sgd_range_without_buffer<E, decays>(values, count, constants);
      return;
    }
    with_constant(arguments.first_step, [&](auto first) {
      with_constant(arguments.nesterov, [&](auto nesterov) {
        sgd_range<E, decays, first, nesterov>(values, count, constants);
      });
    });
  });
}

template <typename E>
void apply(const LionArguments& arguments, const MomentumValues<E>& values, int64_t count) {
  using Compute = typename E::Compute;
  const auto x = values;
  const auto lr = static_cast<Compute>(arguments.lr);
  const auto beta1 = static_cast<Compute>(arguments.beta1);
  const auto keep1 = static_cast<Compute>(1.0 - arguments.beta1);
  const auto beta2 = static_cast<Compute>(arguments.beta2);
  const auto keep2 = static_cast<Compute>(1.0 - arguments.beta2);
  const auto factor = static_cast<Compute>(1.0 - arguments.lr * arguments.weight_decay);
  const auto sign = static_cast<Compute>(arguments.maximize ? -1 : 1);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const Compute p = E::load(x.param[i]) * factor;
    const Compute g = E::load(x.grad[i]) * sign;
    const Compute m = E::load(x.buffer[i]);
    const Compute direction = beta1 * m + keep1 * g;
    // What is neither above nor below 0 is a zero or a NaN, which stays one.
    const Compute rest = direction + Compute(0);
    const Compute update = direction > 0 ? Compute(1) : direction < 0 ? Compute(-1) : rest;
    x.buffer[i] = E::store(beta2 * m + keep2 * g);
    x.param[i] = E::store(p - lr * update);
  }
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
