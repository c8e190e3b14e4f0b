#pragma once

// The optimizers' rules for one element, in the order of operations of torch.optim;
// Lion is Chen et al., "Symbolic Discovery of Optimization Algorithms", algorithm 2.
// Hyperparameters are combined in fp64 and rounded once to the compute type. Loops
// give the flags as constants, where they can: then nothing branches.

#include <cmath>

#include "csrc/kernels/host_device.h"
#include "csrc/kernels/kernels.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

// ---- Adam and AdamW ----

template <typename Compute>
struct AdamConstants {
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

template <typename Compute>
ZERO_HOST_DEVICE AdamConstants<Compute> adam_constants(
    const AdamArguments& arguments,
    int64_t step_number) {
  const auto step = static_cast<double>(step_number);
  const double correction1 = 1.0 - std::pow(arguments.beta1, step);
  const double correction2 = 1.0 - std::pow(arguments.beta2, step);
  AdamConstants<Compute> c;
  c.step_size = static_cast<Compute>(arguments.lr / correction1);
  c.inverse_root = static_cast<Compute>(1.0 / std::sqrt(correction2));
  c.keep1 = static_cast<Compute>(1.0 - arguments.beta1);
  c.beta2 = static_cast<Compute>(arguments.beta2);
  c.keep2 = static_cast<Compute>(1.0 - arguments.beta2);
  c.eps = static_cast<Compute>(arguments.eps);
  c.factor = static_cast<Compute>(1.0 - arguments.lr * arguments.weight_decay);
  c.decay = static_cast<Compute>(arguments.weight_decay);
  c.sign = static_cast<Compute>(arguments.maximize ? -1 : 1);
  return c;
}

struct AdamFlags {
  bool coupled;
  // beta1 up to 0.5: the first moment is taken from the gradient's end, so that
  // beta1 = 0 gives the gradient itself.
  bool near_gradient;
  bool amsgrad;
};

template <typename Compute>
ZERO_HOST_DEVICE AdamFlags
adam_flags(const AdamArguments& arguments, bool amsgrad, const AdamConstants<Compute>& c) {
  const bool coupled = arguments.weight_decay != 0.0 && !arguments.decoupled;
  return {coupled, !(c.keep1 < Compute(0.5)), amsgrad};
}

template <typename Compute>
struct AdamElement {
  Compute param;
  Compute exp_avg;
  Compute exp_avg_sq;
  Compute max_exp_avg_sq; // amsgrad only
};

template <typename Compute>
ZERO_HOST_DEVICE void
step_element(AdamElement<Compute>& x, Compute grad, const AdamConstants<Compute>& c, AdamFlags is) {
  Compute p = x.param;
  Compute g = grad * c.sign;
  if (is.coupled) {
    g = g + c.decay * p;
  } else {
    p = p * c.factor;
  }
  Compute m = x.exp_avg;
  if (is.near_gradient) {
    m = g - (g - m) * (Compute(1) - c.keep1);
  } else {
    m = m + (g - m) * c.keep1;
  }
  // keep2 first: the square alone may overflow.
  const Compute v = x.exp_avg_sq * c.beta2 + c.keep2 * g * g;
  Compute largest = v;
  if (is.amsgrad) {
    const Compute before = x.max_exp_avg_sq;
    const bool stays = (before >= v) | (before != before); // a NaN of either is kept
    largest = stays ? before : v;
    x.max_exp_avg_sq = largest;
  }
  const Compute denominator = std::sqrt(largest) * c.inverse_root + c.eps;
  x.exp_avg = m;
  x.exp_avg_sq = v;
  x.param = p - c.step_size * m / denominator;
}

// ---- SGD and Lion, with one state at most ----

template <typename Compute>
struct MomentumElement {
  Compute param;
  Compute buffer;
};

template <typename Compute>
struct SgdConstants {
  Compute lr;
  Compute momentum;
  Compute fresh; // part of the gradient
  Compute decay;
  Compute sign; // of the gradient
};

template <typename Compute>
ZERO_HOST_DEVICE SgdConstants<Compute> sgd_constants(const SgdArguments& arguments) {
  SgdConstants<Compute> c;
  c.lr = static_cast<Compute>(arguments.lr);
  c.momentum = static_cast<Compute>(arguments.momentum);
  c.fresh = static_cast<Compute>(1.0 - arguments.dampening);
  c.decay = static_cast<Compute>(arguments.weight_decay);
  c.sign = static_cast<Compute>(arguments.maximize ? -1 : 1);
  return c;
}

struct SgdFlags {
  bool decays;
  bool buffered;
  bool first; // step of the buffer, which becomes the gradient
  bool nesterov;
};

template <typename Compute>
ZERO_HOST_DEVICE void step_element(
    MomentumElement<Compute>& x,
    Compute grad,
    const SgdConstants<Compute>& c,
    SgdFlags is) {
  Compute g = grad * c.sign;
  if (is.decays) {
    g = g + c.decay * x.param;
  }
  Compute update = g;
  if (is.buffered) {
    Compute b = g;
    if (!is.first) {
      b = c.momentum * x.buffer + c.fresh * g;
    }
    x.buffer = b;
    update = is.nesterov ? g + c.momentum * b : b;
  }
  x.param = x.param - c.lr * update;
}

template <typename Compute>
struct LionConstants {
  Compute lr;
  Compute beta1;
  Compute keep1;
  Compute beta2;
  Compute keep2;
  Compute factor; // of the parameter
  Compute sign; // of the gradient
};

template <typename Compute>
ZERO_HOST_DEVICE LionConstants<Compute> lion_constants(const LionArguments& arguments) {
  LionConstants<Compute> c;
  c.lr = static_cast<Compute>(arguments.lr);
  c.beta1 = static_cast<Compute>(arguments.beta1);
  c.keep1 = static_cast<Compute>(1.0 - arguments.beta1);
  c.beta2 = static_cast<Compute>(arguments.beta2);
  c.keep2 = static_cast<Compute>(1.0 - arguments.beta2);
  c.factor = static_cast<Compute>(1.0 - arguments.lr * arguments.weight_decay);
  c.sign = static_cast<Compute>(arguments.maximize ? -1 : 1);
  return c;
}

template <typename Compute>
ZERO_HOST_DEVICE void
step_element(MomentumElement<Compute>& x, Compute grad, const LionConstants<Compute>& c) {
  const Compute p = x.param * c.factor;
  const Compute g = grad * c.sign;
  const Compute m = x.buffer;
  const Compute direction = c.beta1 * m + c.keep1 * g;
  // What is neither above nor below 0 is a zero or a NaN, which stays one.
  const Compute rest = direction + Compute(0);
  const Compute update = direction > 0 ? Compute(1) : direction < 0 ? Compute(-1) : rest;
  x.buffer = c.beta2 * m + c.keep2 * g;
  x.param = p - c.lr * update;
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
