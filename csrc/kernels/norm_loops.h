#pragma once

// Sums of powers by blocks of 64 bytes, and largest magnitudes. A block is summed
// in fp64 as a tree of neighbours: each level is one flat loop over the blocks of
// a group, which vectorizes and whose order does not depend on the vector width.

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "csrc/kernels/half_chunks.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

constexpr int64_t kGroup = 16; // blocks

// Adds the sum of each of `blocks` blocks, at most kGroup, of kWidth elements.
template <typename E, int64_t kWidth, typename Power>
void add_blocks(const typename E::Storage* x, int64_t blocks, const Power& power, ExactSum& sum) {
  alignas(64) double levels[2][kGroup * kWidth / 2];
  int64_t pairs = blocks * kWidth / 2;
  double* to = levels[0];
  for (int64_t i = 0; i < pairs; ++i) {
    to[i] = power(static_cast<double>(E::load(x[2 * i]))) +
        power(static_cast<double>(E::load(x[2 * i + 1])));
  }
  for (int64_t width = kWidth / 2; width > 1; width /= 2) {
    const double* __restrict from = to;
    double* __restrict next = from == levels[0] ? levels[1] : levels[0];
    pairs /= 2;
    for (int64_t i = 0; i < pairs; ++i) {
      next[i] = from[2 * i] + from[2 * i + 1];
    }
    to = next;
  }
  for (int64_t block = 0; block < blocks; ++block) {
    sum.add(to[block]);
  }
}

template <typename E, int64_t kWidth, typename Power>
void norm_range(const typename E::Storage* x, int64_t count, const Power& power, ExactSum& sum) {
  int64_t i = 0;
  for (; i + kGroup * kWidth <= count; i += kGroup * kWidth) {
    add_blocks<E, kWidth>(x + i, kGroup, power, sum);
  }
  const int64_t blocks = (count - i) / kWidth;
  add_blocks<E, kWidth>(x + i, blocks, power, sum);
  i += blocks * kWidth;
  if (i < count) {
    typename E::Storage last[kWidth] = {};
    std::copy(x + i, x + count, last);
    add_blocks<E, kWidth>(last, 1, power, sum);
  }
}

template <typename E, typename Power>
void norm_elements(
    E,
    const typename E::Storage* x,
    int64_t count,
    const Power& power,
    ExactSum& sum) {
  norm_range<E, static_cast<int64_t>(64 / sizeof(*x))>(x, count, power, sum);
}

template <typename Power>
void norm_elements(Float16, const uint16_t* x, int64_t count, const Power& power, ExactSum& sum) {
  Chunk chunk;
  for_chunks(0, count, [&](int64_t first, int64_t length) {
    widen(x + first, chunk.values, length);
    norm_range<Float32, 32>(chunk.values, length, power, sum);
  });
}

// The bits of the largest magnitude: ordered as the values are, with NaN above
// infinity.
template <typename E>
auto largest_magnitude(const typename E::Storage* x, int64_t count) {
  using Storage = typename E::Storage;
  using Bits = std::conditional_t<
      sizeof(Storage) == 2,
      uint16_t,
      std::conditional_t<sizeof(Storage) == 4, uint32_t, uint64_t>>;
  constexpr auto kMagnitude = static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1);
  Bits largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<Bits>(bit_cast<Bits>(x[i]) & kMagnitude);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

template <typename E>
void maximum_range(const typename E::Storage* x, int64_t count, ExactSum& sum) {
  const auto largest = bit_cast<typename E::Storage>(largest_magnitude<E>(x, count));
  sum.raise_maximum(static_cast<double>(E::load(largest)));
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
