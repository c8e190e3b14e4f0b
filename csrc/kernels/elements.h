#pragma once

// How elements of each Type are loaded and stored: free of branches, so that
// loops over them vectorize. Included only where kernels are compiled; everything
// lives in the namespace of the instruction set. fp16 takes many steps an element:
// most loops take it by chunks instead (half_chunks.h), and a device converts it by
// itself, to the same bits but for a NaN's.

#include <cstdint>

#include "csrc/kernels/host_device.h"
#include "csrc/kernels/kernels.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

struct Float32 {
  using Storage = float;
  using Compute = float;
  ZERO_HOST_DEVICE static float load(float value) {
    return value;
  }
  ZERO_HOST_DEVICE static float store(float value) {
    return value;
  }
};

struct Float64 {
  using Storage = double;
  using Compute = double;
  ZERO_HOST_DEVICE static double load(double value) {
    return value;
  }
  ZERO_HOST_DEVICE static double store(double value) {
    return value;
  }
};

struct BFloat16 {
  using Storage = uint16_t;
  using Compute = float;
  ZERO_HOST_DEVICE static float load(uint16_t value) {
    return bit_cast<float>(static_cast<uint32_t>(value) << 16);
  }
  // Round to nearest, ties to even; a NaN stays one.
  ZERO_HOST_DEVICE static uint16_t store(float value) {
    const auto bits = bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    return static_cast<uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? 0x7FC0U : rounded);
  }
};

struct Float16 {
  using Storage = uint16_t;
  using Compute = float;
  ZERO_HOST_DEVICE static float load(uint16_t value) {
#if defined(__CUDA_ARCH__)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
#else
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000U) << 16;
    const uint32_t magnitude = value & 0x7FFFU;
    const uint32_t normal = (magnitude << 13) + (112U << 23);
    const uint32_t special = (magnitude << 13) + (224U << 23);
    // A subnormal is its mantissa times 2^-24, which fp32 holds exactly.
    const auto subnormal =
        bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24F);
    const uint32_t finite = magnitude < 0x0400U ? subnormal : normal;
    return bit_cast<float>(sign | (magnitude >= 0x7C00U ? special : finite));
#endif
  }
  // Round to nearest, ties to even; overflow gives infinity, a NaN stays one.
  ZERO_HOST_DEVICE static uint16_t store(float value) {
#if defined(__CUDA_ARCH__)
    uint16_t narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
    return narrow;
#else
    const auto bits = bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000U;
    const uint32_t magnitude = bits & 0x7FFFFFFFU;
    const uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
    const uint32_t normal = (rounded - (112U << 23)) >> 13;
    // Adding 2^23 rounds the scaled subnormal to an integer in its low bits.
    const float scaled = bit_cast<float>(magnitude) * 0x1p24F + 0x1p23F;
    const uint32_t subnormal = bit_cast<uint32_t>(scaled) & 0x7FFU;
    const uint32_t finite = magnitude < (113U << 23) ? subnormal : normal;
    const uint32_t nan = 0x7E00U | ((magnitude >> 13) & 0x1FFU); // as processors do
    const uint32_t large = magnitude > 0x7F800000U ? nan : 0x7C00U;
    return static_cast<uint16_t>(sign | (magnitude >= (143U << 23) ? large : finite));
#endif
  }
};

// The element at `index` of a buffer.
template <typename E>
ZERO_HOST_DEVICE typename E::Storage* at(void* data, int64_t index) {
  return static_cast<typename E::Storage*>(data) + index;
}

template <typename E>
ZERO_HOST_DEVICE const typename E::Storage* at(const void* data, int64_t index) {
  return static_cast<const typename E::Storage*>(data) + index;
}

// Calls function(element type) for a Type.
template <typename Function>
void with_elements(Type type, Function&& function) {
  switch (type) {
  case Type::f32:
    function(Float32{});
    break;
  case Type::f64:
    function(Float64{});
    break;
  case Type::bf16:
    function(BFloat16{});
    break;
  case Type::f16:
    function(Float16{});
    break;
  }
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
