#pragma once

// What lets rules be compiled for the host and for a device.

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

#if defined(__CUDACC__)
#define ZERO_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ZERO_HOST_DEVICE [[gnu::always_inline]] inline
#endif

// std::bit_cast is for the host alone.
template <typename To, typename From>
ZERO_HOST_DEVICE To bit_cast(const From& from) {
  return __builtin_bit_cast(To, from);
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
