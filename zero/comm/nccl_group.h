#pragma once

// The one place that makes NCCL groups, in builds with CUDA (ZERO_WITH_CUDA).

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <zero/api.h>

namespace c10d {
class Backend;
class Store;
} // namespace c10d

namespace zero::comm {

// Whether this build can make NCCL groups; a GPU is another matter.
ZERO_API bool has_nccl();

struct Gpu {
  c10::Device device;
  std::string id; // no other GPU has it, on any host
};
// What a process works on: the device LOCAL_RANK modulo the number of devices that it
// sees. nullopt where it sees none, or this build has no CUDA.
std::optional<Gpu> gpu_of(int64_t local_rank);

// Why NCCL cannot connect ranks on these GPUs, as a clause; "" where it can. `gpus`: their
// ids in rank order, "" for a rank without one. NCCL wants a GPU of its own for each rank.
ZERO_API std::string nccl_obstacle(const std::vector<std::string>& gpus);
// Why it could not, and what to do.
ZERO_API extern const char* const kGpuRemedy;

// Collective. An NCCL backend over `store`, which must be new to it (a prefix of its own),
// for tensors on `device` of this rank. It shares nothing with the user's groups. NCCL
// connects in the first operation. After `timeout_seconds` torch's watchdog ends the
// process, naming the operation (TORCH_NCCL_ASYNC_ERROR_HANDLING). `high_priority`: its
// kernels run on a stream of high priority. Call shutdown() before letting go of it.
//
// Throws on every rank c10::DistBackendError that names the ranks that did not come or
// have no GPU of their own, before NCCL is asked; c10::ValueError for a bad device;
// c10::NotImplementedError where !has_nccl().
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(
    const c10::intrusive_ptr<c10d::Store>& store,
    int64_t rank,
    int64_t size,
    double timeout_seconds,
    c10::Device device,
    bool high_priority);

} // namespace zero::comm
