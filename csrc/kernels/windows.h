#pragma once

// Buffers of any type as fp32 values: read and rounded by stretches, and windows
// through which fp32 loops work on buffers of 16 bits, a chunk at a time.

#include <algorithm>
#include <cmath>

#include "csrc/kernels/half_chunks.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

// to[i] = from[i] as fp32, exact but for fp64, which is rounded.
[[gnu::noinline]] inline void
read_floats(Type type, const void* from, int64_t first, float* to, int64_t count) {
  if (type == Type::f16) {
    widen(at<Float16>(from, first), to, count);
    return;
  }
  with_elements(type, [&](auto element) {
    using E = decltype(element);
    const auto* values = at<E>(from, first);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      to[i] = static_cast<float>(E::load(values[i]));
    }
  });
}

[[gnu::noinline]] inline void
write_floats(Type type, const float* from, void* to, int64_t first, int64_t count) {
  if (type == Type::f16) {
    narrow(from, at<Float16>(to, first), count);
    return;
  }
  with_elements(type, [&](auto element) {
    using E = decltype(element);
    auto* values = at<E>(to, first);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      values[i] = E::store(from[i]);
    }
  });
}

// The stretch's values: the buffer's own where they are fp32, else a copy in `chunk`.
inline const float*
view_floats(Type type, const void* data, int64_t first, int64_t count, Chunk& chunk) {
  if (type == Type::f32) {
    return at<Float32>(data, first);
  }
  read_floats(type, data, first, chunk.values, count);
  return chunk.values;
}

// The same, to be changed: close() rounds a copy back into the buffer.
class Window {
 public:
  Window(Type type, void* data) : type_(type), data_(data) {}

  // Null where there is no buffer.
  float* open(int64_t first, int64_t count) {
    if (data_ == nullptr || type_ == Type::f32) {
      return data_ == nullptr ? nullptr : at<Float32>(data_, first);
    }
    read_floats(type_, data_, first, chunk_.values, count);
    return chunk_.values;
  }

  void close(int64_t first, int64_t count) const {
    if (data_ != nullptr && type_ != Type::f32) {
      write_floats(type_, chunk_.values, data_, first, count);
    }
  }

 private:
  Type type_;
  void* data_;
  Chunk chunk_;
};

// Calls function(element type) and returns true where one loop can work on the
// buffers themselves: all are of one type, which takes few steps to load and store.
template <typename Function>
bool with_direct_elements(Type type, Type grad_type, const Copy& copy, const Function& function) {
  if (grad_type != type || copy.data != nullptr || type == Type::f16) {
    return false;
  }
  if (type == Type::f32) {
    function(Float32{});
  } else if (type == Type::f64) {
    function(Float64{});
  } else {
    function(BFloat16{});
  }
  return true;
}

inline void write_copy(const Copy& copy, const float* values, int64_t first, int64_t count) {
  if (copy.data != nullptr) {
    write_floats(copy.type, values, copy.data, first, count);
  }
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
