#pragma once

// Which c10d backend carries the tensors of a device.

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <c10/core/Device.h>

#include <zero/api.h>
#include <zero/comm/make_communicator.h>

namespace zero::comm {

class Communicator;

// [collective] A private backend among ranks that meet at `store`, which is new to it.
using DeviceBackend = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store,
    int64_t rank,
    int64_t size,
    double timeout_seconds,
    c10::Device device)>;

// For all devices of a type. CUDA's is NCCL, in builds that have it.
ZERO_API void register_device_backend(c10::DeviceType type, DeviceBackend backend);

// The communicator with collectives for tensors on devices too, where this process has
// devices. `shard` and `replicate`: the groups of the ranks, none for one of one rank.
// `transport`: "nccl" wants the device's own backend, "host" and "group" go through the
// host; "auto" takes the backend where there is one, and several ranks.
// `registered_buffers`: see Options.
std::shared_ptr<Communicator> with_devices(
    std::shared_ptr<Communicator> host,
    const std::optional<Membership>& shard,
    const std::optional<Membership>& replicate,
    double timeout_seconds,
    const std::string& transport,
    bool registered_buffers);

} // namespace zero::comm
