#pragma once

// One rank's values of a model's buffers on all ranks, in one broadcast.

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/comm/communicator.h>

namespace zero {

struct NamedBuffer {
  std::string name;
  at::Tensor tensor;
  // Running statistics, which a forward writes to unseen by autograd, as a sync may:
  // backward in training doesn't read them. Others count as changed in place.
  bool statistics = false;
};

namespace optim {

// [collective] What differs from the bits of rank `root` becomes it. Ranks whose buffers
// have other names, shapes or dtypes get an error of the communicator.
void sync_buffers(
    const std::vector<NamedBuffer>& buffers,
    comm::Communicator& communicator,
    int64_t root,
    int64_t step);

} // namespace optim
} // namespace zero
