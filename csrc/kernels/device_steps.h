#pragma once

// The optimizers' steps as works over packs.

#include "csrc/kernels/device_kernels.h"
#include "csrc/kernels/device_packs.h"
#include "csrc/kernels/optimizer_rules.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

ZERO_HOST_DEVICE bool left_out(const float* found_nonfinite) {
  return found_nonfinite != nullptr && *found_nonfinite != 0.0F;
}

template <int kPack>
ZERO_HOST_DEVICE void store_copy(const Copy& copy, int64_t index, const float (&values)[kPack]) {
  const auto store = [&](auto element) {
    using To = decltype(element);
    Pack<To, kPack> pack;
    ZERO_UNROLL
    for (int j = 0; j < kPack; ++j) {
      pack.values[j] = To::store(values[j]);
    }
    store_pack<To, kPack>(copy.data, index, pack);
  };
  if (copy.type == Type::bf16) {
    store(BFloat16{});
  } else if (copy.type == Type::f16) {
    store(Float16{});
  } else {
    store(Float32{});
  }
}

// Parameters and state of E, gradients of G.
template <typename E, typename G>
struct AdamWork {
  using Compute = typename E::Compute;
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = sizeof(typename G::Storage) == 8 ? 2
      : sizeof(typename G::Storage) == 4                          ? 3
                                                                  : 4;

  struct Constants {
    AdamConstants<Compute> rule;
    AdamFlags is;
    bool runs;
  };

  AdamBuffers x;
  AdamArguments arguments;
  StepState state;

  ZERO_HOST_DEVICE Constants constants() const {
    Constants c;
    c.rule = adam_constants<Compute>(arguments, *state.step);
    c.is = adam_flags(arguments, x.max_exp_avg_sq != nullptr, c.rule);
    c.runs = !left_out(state.found_nonfinite);
    return c;
  }

  template <int kPack>
  struct Loaded {
    Pack<E, kPack> param;
    Pack<G, kPack> grad;
    Pack<E, kPack> exp_avg;
    Pack<E, kPack> exp_avg_sq;
    Pack<E, kPack> max_exp_avg_sq;
  };

  template <int kPack>
  ZERO_HOST_DEVICE Loaded<kPack> load(int64_t index, const Constants& c) const {
    Loaded<kPack> loaded;
    loaded.param = load_pack<E, kPack>(x.param, index);
    loaded.grad = load_pack<G, kPack>(x.grad, index);
    loaded.exp_avg = load_pack<E, kPack>(x.exp_avg, index);
    loaded.exp_avg_sq = load_pack<E, kPack>(x.exp_avg_sq, index);
    loaded.max_exp_avg_sq =
        c.is.amsgrad ? load_pack<E, kPack>(x.max_exp_avg_sq, index) : Pack<E, kPack>{};
    return loaded;
  }

  template <int kPack>
  ZERO_HOST_DEVICE void finish(int64_t index, Loaded<kPack> pack, const Constants& c) const {
    [[maybe_unused]] float params[kPack]; // for a copy, of masters
    ZERO_UNROLL
    for (int j = 0; j < kPack; ++j) {
      AdamElement<Compute> element{
          E::load(pack.param.values[j]),
          E::load(pack.exp_avg.values[j]),
          E::load(pack.exp_avg_sq.values[j]),
          E::load(pack.max_exp_avg_sq.values[j])};
      step_element(element, Compute(G::load(pack.grad.values[j])), c.rule, c.is);
      if constexpr (std::is_same_v<E, Float32>) {
        params[j] = element.param;
      }
      pack.param.values[j] = E::store(element.param);
      pack.exp_avg.values[j] = E::store(element.exp_avg);
      pack.exp_avg_sq.values[j] = E::store(element.exp_avg_sq);
      pack.max_exp_avg_sq.values[j] = E::store(element.max_exp_avg_sq);
    }
    store_pack<E, kPack>(x.param, index, pack.param);
    store_pack<E, kPack>(x.exp_avg, index, pack.exp_avg);
    store_pack<E, kPack>(x.exp_avg_sq, index, pack.exp_avg_sq);
    if (c.is.amsgrad) {
      store_pack<E, kPack>(x.max_exp_avg_sq, index, pack.max_exp_avg_sq);
    }
    if constexpr (std::is_same_v<E, Float32>) {
      if (x.copy.data != nullptr) {
        store_copy<kPack>(x.copy, index, params);
      }
    }
  }
};

// The rule of a step with one state at most, and which of its buffer is used.
template <typename Compute>
struct SgdStep {
  SgdConstants<Compute> rule;
  SgdFlags is;

  ZERO_HOST_DEVICE void prepare(const SgdArguments& arguments, bool buffered, int64_t step_number) {
    rule = sgd_constants<Compute>(arguments);
    is = {arguments.weight_decay != 0.0, buffered, step_number == 1, arguments.nesterov};
  }
  ZERO_HOST_DEVICE bool reads() const {
    return is.buffered && !is.first;
  }
  ZERO_HOST_DEVICE bool writes() const {
    return is.buffered;
  }
  ZERO_HOST_DEVICE void apply(MomentumElement<Compute>& element, Compute gradient) const {
    step_element(element, gradient, rule, is);
  }
};

template <typename Compute>
struct LionStep {
  LionConstants<Compute> rule;

  ZERO_HOST_DEVICE void prepare(const LionArguments& arguments, bool, int64_t) {
    rule = lion_constants<Compute>(arguments);
  }
  ZERO_HOST_DEVICE bool reads() const {
    return true;
  }
  ZERO_HOST_DEVICE bool writes() const {
    return true;
  }
  ZERO_HOST_DEVICE void apply(MomentumElement<Compute>& element, Compute gradient) const {
    step_element(element, gradient, rule);
  }
};

template <typename E, typename G, template <typename> typename Step, typename Arguments>
struct MomentumWork {
  using Compute = typename E::Compute;
  static constexpr int kUnroll = std::is_same_v<E, Float32> ? 2 : 1;
  static constexpr int kBlocks = 4;

  struct Constants {
    Step<Compute> step;
    bool runs;
  };

  void* param;
  const void* grad;
  void* buffer;
  Copy copy;
  Arguments arguments;
  StepState state;

  ZERO_HOST_DEVICE Constants constants() const {
    Constants c;
    c.step.prepare(arguments, buffer != nullptr, *state.step);
    c.runs = !left_out(state.found_nonfinite);
    return c;
  }

  template <int kPack>
  struct Loaded {
    Pack<E, kPack> param;
    Pack<G, kPack> grad;
    Pack<E, kPack> buffer;
  };

  template <int kPack>
  ZERO_HOST_DEVICE Loaded<kPack> load(int64_t index, const Constants& c) const {
    Loaded<kPack> loaded;
    loaded.param = load_pack<E, kPack>(param, index);
    loaded.grad = load_pack<G, kPack>(grad, index);
    loaded.buffer = c.step.reads() ? load_pack<E, kPack>(buffer, index) : Pack<E, kPack>{};
    return loaded;
  }

  template <int kPack>
  ZERO_HOST_DEVICE void finish(int64_t index, Loaded<kPack> pack, const Constants& c) const {
    [[maybe_unused]] float params[kPack]; // for a copy, of masters
    ZERO_UNROLL
    for (int j = 0; j < kPack; ++j) {
      MomentumElement<Compute> element{
          E::load(pack.param.values[j]), E::load(pack.buffer.values[j])};
      c.step.apply(element, Compute(G::load(pack.grad.values[j])));
      if constexpr (std::is_same_v<E, Float32>) {
        params[j] = element.param;
      }
      pack.param.values[j] = E::store(element.param);
      pack.buffer.values[j] = E::store(element.buffer);
    }
    store_pack<E, kPack>(param, index, pack.param);
    if (c.step.writes()) {
      store_pack<E, kPack>(buffer, index, pack.buffer);
    }
    if constexpr (std::is_same_v<E, Float32>) {
      if (copy.data != nullptr) {
        store_copy<kPack>(copy, index, params);
      }
    }
  }
};

template <typename E, typename G>
using SgdWork = MomentumWork<E, G, SgdStep, SgdArguments>;
template <typename E, typename G>
using LionWork = MomentumWork<E, G, LionStep, LionArguments>;

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
