#pragma once

// What is done to one element, beside the optimizers' rules.

#include <cmath>
#include <type_traits>

#include "csrc/kernels/elements.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

// The bounds have the compute type. A NaN stays.
template <typename Compute>
ZERO_HOST_DEVICE Compute clamped(Compute value, Compute least, Compute most) {
  const Compute raised = value < least ? least : value;
  return raised > most ? most : raised;
}

// Towards zero, with the last bit set where that is not exact: rounded once more to
// fewer bits, it gives what rounding the fp64 value directly gives.
ZERO_HOST_DEVICE float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const auto back = static_cast<double>(nearest);
  auto bits = bit_cast<uint32_t>(nearest);
  bits -= std::abs(back) > std::abs(value) ? 1U : 0U;
  bits |= back != value ? 1U : 0U;
  return bit_cast<float>(bits);
}

// The element in another type, rounded once.
template <typename From, typename To>
ZERO_HOST_DEVICE typename To::Storage converted(typename From::Storage value) {
  if constexpr (std::is_same_v<From, To>) {
    return value;
  } else if constexpr (std::is_same_v<From, Float64> && sizeof(typename To::Storage) == 2) {
    return To::store(round_to_odd(value));
  } else {
    return To::store(static_cast<typename To::Compute>(From::load(value)));
  }
}

// `given`, unless that is `held` rounded to its type, whose value `rounded` is.
ZERO_HOST_DEVICE float followed(float held, float rounded, float given) {
  return bit_cast<uint32_t>(rounded) == bit_cast<uint32_t>(given) ? held : given;
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
