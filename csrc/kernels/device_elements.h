#pragma once

// Elementwise kernels and sums over ranks as works over packs.

#include "csrc/kernels/device_kernels.h"
#include "csrc/kernels/device_packs.h"
#include "csrc/kernels/element_rules.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

struct NoConstants {
  bool runs;
};

// What elements are multiplied by, rounded to the compute type.
template <typename Compute>
ZERO_HOST_DEVICE Compute rounded_factor(double factor, const double* device_factor) {
  return static_cast<Compute>(device_factor == nullptr ? factor : factor * *device_factor);
}

template <typename E>
struct ScaleWork {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 6;

  struct Constants {
    typename E::Compute factor;
    bool runs;
  };

  void* x;
  double factor;
  const double* device_factor;

  ZERO_HOST_DEVICE Constants constants() const {
    const auto rounded = rounded_factor<typename E::Compute>(factor, device_factor);
    return {rounded, rounded != 1};
  }

  template <int kPack>
  ZERO_HOST_DEVICE Pack<E, kPack> load(int64_t index, const Constants&) const {
    return load_pack<E, kPack>(x, index);
  }

  template <int kPack>
  ZERO_HOST_DEVICE void finish(int64_t index, Pack<E, kPack> pack, const Constants& c) const {
    ZERO_UNROLL
    for (int j = 0; j < kPack; ++j) {
      pack.values[j] = E::store(E::load(pack.values[j]) * c.factor);
    }
    store_pack<E, kPack>(x, index, pack);
  }
};

template <typename E>
struct ClampWork {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 6;

  void* x;
  typename E::Compute least;
  typename E::Compute most;

  ZERO_HOST_DEVICE NoConstants constants() const {
    return {true};
  }

  template <int kPack>
  ZERO_HOST_DEVICE Pack<E, kPack> load(int64_t index, const NoConstants&) const {
    return load_pack<E, kPack>(x, index);
  }

  template <int kPack>
  ZERO_HOST_DEVICE void finish(int64_t index, Pack<E, kPack> pack, const NoConstants&) const {
    ZERO_UNROLL
    for (int j = 0; j < kPack; ++j) {
      pack.values[j] = E::store(clamped(E::load(pack.values[j]), least, most));
    }
    store_pack<E, kPack>(x, index, pack);
  }
};

template <typename From, typename To>
struct ConvertWork {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 6;

  const void* from;
  void* to;

  ZERO_HOST_DEVICE NoConstants constants() const {
    return {true};
  }

  template <int kPack>
  ZERO_HOST_DEVICE Pack<From, kPack> load(int64_t index, const NoConstants&) const {
    return load_pack<From, kPack>(from, index);
  }

  template <int kPack>
  ZERO_HOST_DEVICE void finish(int64_t index, const Pack<From, kPack>& given, const NoConstants&)
      const {
    Pack<To, kPack> pack;
    ZERO_UNROLL
    for (int j = 0; j < kPack; ++j) {
      pack.values[j] = converted<From, To>(given.values[j]);
    }
    store_pack<To, kPack>(to, index, pack);
  }
};

// Rules of the element given and the one held.
struct Accumulated {
  template <typename From>
  ZERO_HOST_DEVICE static float of(float held, typename From::Storage given) {
    return held + static_cast<float>(From::load(given));
  }
};

struct Followed {
  template <typename From>
  ZERO_HOST_DEVICE static float of(float held, typename From::Storage given) {
    const auto rounded = From::load(From::store(static_cast<typename From::Compute>(held)));
    return followed(held, static_cast<float>(rounded), static_cast<float>(From::load(given)));
  }
};

template <typename From, typename Rule>
struct IntoFloatsWork {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 6;

  const void* from;
  float* to;

  template <int kPack>
  struct Loaded {
    Pack<From, kPack> given;
    Pack<Float32, kPack> held;
  };

  ZERO_HOST_DEVICE NoConstants constants() const {
    return {true};
  }

  template <int kPack>
  ZERO_HOST_DEVICE Loaded<kPack> load(int64_t index, const NoConstants&) const {
    return {load_pack<From, kPack>(from, index), load_pack<Float32, kPack>(to, index)};
  }

  template <int kPack>
  ZERO_HOST_DEVICE void finish(int64_t index, Loaded<kPack> pack, const NoConstants&) const {
    ZERO_UNROLL
    for (int j = 0; j < kPack; ++j) {
      pack.held.values[j] = Rule::template of<From>(pack.held.values[j], pack.given.values[j]);
    }
    store_pack<Float32, kPack>(to, index, pack.held);
  }
};

template <typename E, typename Out>
struct ReduceWork {
  using Compute = typename E::Compute;
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 4;

  StridedReduction x;

  template <int kPack>
  struct Sums {
    Compute values[kPack];
  };

  ZERO_HOST_DEVICE NoConstants constants() const {
    return {true};
  }

  template <int kPack>
  ZERO_HOST_DEVICE Sums<kPack> load(int64_t index, const NoConstants&) const {
    Sums<kPack> sums;
    const auto first = load_pack<E, kPack>(x.inputs, index);
    ZERO_UNROLL
    for (int j = 0; j < kPack; ++j) {
      sums.values[j] = E::load(first.values[j]);
    }
    int64_t k = 1;
    for (; k + kAhead <= x.input_count; k += kAhead) {
      add<kPack, kAhead>(sums, index, k);
    }
    for (; k < x.input_count; ++k) {
      add<kPack, 1>(sums, index, k);
    }
    return sums;
  }

  template <int kPack>
  ZERO_HOST_DEVICE void finish(int64_t index, const Sums<kPack>& sums, const NoConstants&) const {
    const auto by = static_cast<Compute>(x.divisor);
    Pack<Out, kPack> out;
    if (x.addend != nullptr) {
      const auto base = load_pack<Out, kPack>(x.addend, index);
      ZERO_UNROLL
      for (int j = 0; j < kPack; ++j) {
        out.values[j] = Out::store(Out::load(base.values[j]) + sums.values[j] / by);
      }
    } else {
      ZERO_UNROLL
      for (int j = 0; j < kPack; ++j) {
        out.values[j] = Out::store(sums.values[j] / by);
      }
    }
    store_pack<Out, kPack>(x.out, index, out);
  }

 private:
  static constexpr int kAhead = 3; // inputs loaded before the first is added

  template <int kPack, int kInputs>
  ZERO_HOST_DEVICE void add(Sums<kPack>& sums, int64_t index, int64_t k) const {
    Pack<E, kPack> next[kInputs];
    ZERO_UNROLL
    for (int i = 0; i < kInputs; ++i) {
      next[i] = load_pack<E, kPack>(x.inputs, index + (k + i) * x.stride);
    }
    ZERO_UNROLL
    for (int i = 0; i < kInputs; ++i) {
      ZERO_UNROLL
      for (int j = 0; j < kPack; ++j) {
        sums.values[j] += E::load(next[i].values[j]);
      }
    }
  }
};

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
