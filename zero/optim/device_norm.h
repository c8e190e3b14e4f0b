#pragma once

// Norms of gradients on a device, without waiting for it: the same number on every
// rank, in each step the same for the same gradients. Sums are taken in fp64, so that
// rounded to fp32 they are the CPU's but for a rare last bit.

#include <zero/optim/gradient_norm.h>

namespace zero::optim {

struct DeviceNorms {
  at::Tensor values; // fp64, one a norm
  at::Tensor found_nonfinite; // fp32, one element: 1 where one is not finite, else 0
};

// [collective] As gradient_norms().
DeviceNorms device_norms(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    comm::Communicator& communicator,
    c10::Device device,
    const NormOptions& options);

// What scales gradients of this norm (fp64, one element) to at most `max_norm`: fp64.
at::Tensor device_clip_factor(const at::Tensor& norm, double max_norm);

} // namespace zero::optim
