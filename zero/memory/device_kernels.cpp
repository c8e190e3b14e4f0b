#include <zero/memory/device_kernels.h>

#include <array>
#include <atomic>

#include <c10/util/Exception.h>

#ifdef ZERO_CUDA
#include <ATen/Context.h>
#endif

namespace zero::memory {
namespace {

using Table =
    std::array<std::atomic<const kernels::DeviceKernels*>, c10::COMPILE_TIME_MAX_DEVICE_TYPES>;

Table& table() {
  static Table kernels{};
  return kernels;
}

const kernels::DeviceKernels* find(c10::DeviceType type) {
  const kernels::DeviceKernels* found = table().at(static_cast<size_t>(type));
#ifdef ZERO_CUDA
  if (found == nullptr && type == c10::DeviceType::CUDA) {
    found = &kernels::cuda_kernels();
  }
#endif
  return found;
}

} // namespace

void register_device_kernels(c10::DeviceType type, const kernels::DeviceKernels& kernels) {
  table().at(static_cast<size_t>(type)) = &kernels;
}

bool devices_present() {
  for (const auto& registered : table()) {
    if (registered != nullptr) {
      return true;
    }
  }
#ifdef ZERO_CUDA
  return at::globalContext().hasCUDA();
#else
  return false;
#endif
}

const kernels::DeviceKernels& device_kernels(c10::DeviceType type) {
  const kernels::DeviceKernels* found = find(type);
  TORCH_CHECK_NOT_IMPLEMENTED(
      found != nullptr,
      "[zero.memory] expected kernels for parameters on ",
      c10::DeviceTypeName(type, /*lower_case=*/true),
      ", and this build of Zero has none; build it with ZERO_WITH_CUDA=ON where torch has CUDA "
      "(zero-torch: CMAKE_ARGS=-DZERO_WITH_CUDA=ON pip install --no-build-isolation .), or keep "
      "the model on the CPU");
  return *found;
}

} // namespace zero::memory
