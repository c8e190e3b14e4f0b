#pragma once

// Which kernels work on tensors that are not the CPU's.

#include <c10/core/Device.h>

#include <zero/api.h>

#include "csrc/kernels/device_kernels.h"

namespace zero::memory {

// For all devices of a type; `kernels` is never destroyed. CUDA's are there in builds
// that have them.
ZERO_API void register_device_kernels(c10::DeviceType type, const kernels::DeviceKernels& kernels);
// Throws c10::NotImplementedError where there are none: the build lacks them.
const kernels::DeviceKernels& device_kernels(c10::DeviceType type);
// Whether this process has a device that there are kernels for.
bool devices_present();

} // namespace zero::memory
