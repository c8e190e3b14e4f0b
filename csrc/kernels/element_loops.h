#pragma once

// What is done to each element of one buffer, and between buffers of two types.

#include <cstring>
#include <limits>

#include "csrc/kernels/element_rules.h"
#include "csrc/kernels/norm_loops.h"
#include "csrc/kernels/windows.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

// x[i] = change(x[i]), which is given the compute type's values.
template <typename Change>
void change_elements(Type type, void* x, int64_t begin, int64_t end, const Change& change) {
  if (type == Type::f16) {
    Window window(type, x);
    for_chunks(begin, end, [&](int64_t first, int64_t count) {
      float* const values = window.open(first, count);
      for (int64_t i = 0; i < count; ++i) {
        values[i] = change(values[i]);
      }
      window.close(first, count);
    });
    return;
  }
  with_elements(type, [&](auto element) {
    using E = decltype(element);
    auto* const values = at<E>(x, begin);
    const int64_t count = end - begin;
    for (int64_t i = 0; i < count; ++i) {
      values[i] = E::store(change(E::load(values[i])));
    }
  });
}

inline void
widen_to_doubles(Type from_type, const void* from, double* to, int64_t begin, int64_t end) {
  Chunk chunk;
  for_chunks(begin, end, [&](int64_t first, int64_t count) {
    const float* const values = view_floats(from_type, from, first, count, chunk);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      to[first + i] = static_cast<double>(values[i]);
    }
  });
}

// To a type other than fp64.
inline void convert_elements(
    Type from_type,
    const void* from,
    Type to_type,
    void* to,
    int64_t begin,
    int64_t end) {
  if (to_type == Type::f32) {
    read_floats(from_type, from, begin, at<Float32>(to, begin), end - begin);
    return;
  }
  Chunk chunk;
  for_chunks(begin, end, [&](int64_t first, int64_t count) {
    const float* values = chunk.values;
    if (from_type == Type::f64) {
      const double* const doubles = at<Float64>(from, first);
      for (int64_t i = 0; i < count; ++i) {
        chunk.values[i] = round_to_odd(doubles[i]);
      }
    } else {
      values = view_floats(from_type, from, first, count, chunk);
    }
    write_floats(to_type, values, to, first, count);
  });
}

// The index from `begin` on of the first infinity or NaN, or `end`.
template <typename E>
int64_t find_nonfinite(const typename E::Storage* x, int64_t begin, int64_t end) {
  using Bits = decltype(largest_magnitude<E>(x, 0));
  const auto infinity =
      bit_cast<Bits>(E::store(std::numeric_limits<typename E::Compute>::infinity()));
  int64_t found = end;
  for (int64_t first = begin; first < end && found == end; first += kChunk) {
    const int64_t count = std::min(kChunk, end - first);
    if (largest_magnitude<E>(x + first, count) >= infinity) {
      found = first;
      while (largest_magnitude<E>(x + found, 1) < infinity) {
        ++found;
      }
    }
  }
  return found;
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
