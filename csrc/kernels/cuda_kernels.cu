// The device kernels for CUDA. Compiled with -fmad=false: products and sums round as
// they do on the host.

#define ZERO_KERNELS_NAMESPACE cuda

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

#include "csrc/kernels/device_kernels_impl.h"

namespace zero::kernels {
namespace ZERO_KERNELS_NAMESPACE {

struct Block {
  double* lanes; // shared by the threads

  template <typename Function>
  ZERO_HOST_DEVICE void each([[maybe_unused]] const Function& function) const {
#if defined(__CUDA_ARCH__)
    function(static_cast<int>(threadIdx.x));
    __syncthreads();
#endif
  }
};

template <int kPack, typename Work>
__global__ void __launch_bounds__(kThreads, Work::kBlocks)
    span_kernel(const __grid_constant__ Work work, const __grid_constant__ Span span) {
  __shared__ decltype(work.constants()) constants;
  if (threadIdx.x == 0) {
    constants = work.constants();
  }
  __syncthreads();
  if (!constants.runs) {
    return;
  }
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  run_span<kPack>(work, constants, span, thread, static_cast<int64_t>(gridDim.x) * kThreads);
}

template <typename Body>
__global__ void __launch_bounds__(kThreads) block_kernel(const __grid_constant__ Body body) {
  __shared__ double lanes[kThreads];
  body(Block{lanes}, static_cast<int64_t>(blockIdx.x));
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(
        std::string("[zero.kernels] ") + what + ": " + cudaGetErrorName(error) + ", " +
        cudaGetErrorString(error));
  }
}

// Of the current device; asked for once.
int multiprocessor_count() {
  constexpr int kDevices = 64;
  static std::array<std::atomic<int>, kDevices> known{};
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  int count = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    check(
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
    if (device < kDevices) {
      known[device].store(count, std::memory_order_relaxed);
    }
  }
  return count;
}

class CudaLauncher {
 public:
  template <int kPack, typename Work>
  void span(StreamHandle stream, const char* name, const Work& work, const Span& span) const {
    if (span.count == 0) {
      return;
    }
    const int64_t edges = span.count - span.packs * kPack;
    const int64_t turns = std::max((span.packs + Work::kUnroll - 1) / Work::kUnroll, edges);
    const int64_t most = static_cast<int64_t>(multiprocessor_count()) * Work::kBlocks;
    const auto grid = static_cast<unsigned>(std::min((turns + kThreads - 1) / kThreads, most));
    span_kernel<kPack><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(work, span);
    check(cudaGetLastError(), name);
  }

  template <typename Body>
  void blocks(StreamHandle stream, const char* name, const Body& body, int64_t count) const {
    const auto grid = static_cast<unsigned>(count);
    block_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(body);
    check(cudaGetLastError(), name);
  }
};

} // namespace ZERO_KERNELS_NAMESPACE

const DeviceKernels& cuda_kernels() {
  static const ZERO_KERNELS_NAMESPACE::KernelsOver<ZERO_KERNELS_NAMESPACE::CudaLauncher> kernels;
  return kernels;
}

} // namespace zero::kernels
