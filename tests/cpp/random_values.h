#pragma once

// Values that follow from (seed, rank, index), so that each rank knows what the
// others hold, the reduction of them, and buffers that notice writes beside them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include <ATen/ATen.h>

#include <zero/memory/flat_buffer.h>

namespace zero::test {

inline uint32_t random_bits(uint64_t seed, int64_t rank, int64_t index) {
  uint64_t x = seed + static_cast<uint64_t>(rank + 1) * 0x8f3b6c2d1e5a4977ULL;
  x = (x ^ (static_cast<uint64_t>(index) * 0xd1c8a5e37b94f26bULL)) * 0xa24baed4963ee407ULL;
  x ^= x >> 31;
  x *= 0x9fb21c651e98df25ULL;
  return static_cast<uint32_t>(x >> 32);
}

// Of several magnitudes, so that the order of a sum shows.
template <typename T>
T random_value(uint64_t seed, int64_t rank, int64_t index) {
  const uint32_t bits = random_bits(seed, rank, index);
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(bits);
  } else {
    const auto fraction = static_cast<float>(static_cast<int32_t>(bits) >> 8) / (1 << 23);
    return static_cast<T>(std::ldexp(fraction, static_cast<int>(bits % 13) - 6));
  }
}

// f(T{}) for the type of `dtype`'s elements.
template <typename F>
void with_type(at::ScalarType dtype, const F& f) {
  switch (dtype) {
  case at::kFloat:
    return f(float{});
  case at::kDouble:
    return f(double{});
  case at::kBFloat16:
    return f(at::BFloat16{});
  case at::kHalf:
    return f(at::Half{});
  case at::kByte:
    return f(uint8_t{});
  case at::kChar:
    return f(int8_t{});
  case at::kShort:
    return f(int16_t{});
  case at::kUInt16:
    return f(uint16_t{});
  case at::kInt:
    return f(int32_t{});
  default:
    TORCH_INTERNAL_ASSERT(dtype == at::kLong);
    return f(int64_t{});
  }
}

// addend + (the sum over ranks) / divisor, where integers wrap.
template <typename T>
T reduced_value(
    uint64_t seed,
    int64_t size,
    int64_t index,
    double divisor,
    const std::optional<T>& addend) {
  if constexpr (std::is_integral_v<T>) {
    uint64_t sum = addend ? static_cast<uint64_t>(*addend) : 0;
    for (int64_t rank = 0; rank < size; ++rank) {
      sum += static_cast<uint64_t>(random_value<T>(seed, rank, index));
    }
    return static_cast<T>(sum);
  } else {
    using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
    auto sum = static_cast<Compute>(random_value<T>(seed, 0, index));
    for (int64_t rank = 1; rank < size; ++rank) {
      sum += static_cast<Compute>(random_value<T>(seed, rank, index));
    }
    sum /= static_cast<Compute>(divisor);
    return static_cast<T>(addend ? static_cast<Compute>(*addend) + sum : sum);
  }
}

// `count` elements somewhere in an allocation whose other bytes are to stay.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  // In memory of `source`, where it is given and has some.
  GuardedBuffer(
      at::ScalarType dtype,
      int64_t count,
      int64_t offset,
      memory::BufferSource* source = nullptr)
      : whole_(make(dtype, offset + count + kBehind, source)),
        view(whole_.narrow(0, offset, count)) {
    std::memset(whole_.mutable_data_ptr(), kFill, whole_.nbytes());
  }

  bool intact() const {
    const auto* first = static_cast<const char*>(whole_.const_data_ptr());
    const auto* begin = first + view.storage_offset() * whole_.itemsize();
    const auto is_fill = [](char c) { return c == kFill; };
    return std::all_of(first, begin, is_fill) &&
        std::all_of(begin + view.nbytes(), first + whole_.nbytes(), is_fill);
  }

 private:
  static at::Tensor make(at::ScalarType dtype, int64_t count, memory::BufferSource* source) {
    const auto bytes = count * static_cast<int64_t>(c10::elementSize(dtype));
    if (const auto storage = source == nullptr ? c10::Storage() : source->allocate(bytes)) {
      return memory::tensor_over(storage, {count}, {1}, dtype);
    }
    return at::empty({count}, dtype);
  }

  static constexpr int64_t kBehind = 9;
  static constexpr char kFill = 0x5a;

  at::Tensor whole_;

 public:
  at::Tensor view;
};

} // namespace zero::test
