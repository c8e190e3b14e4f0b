#include <zero/comm/device_backend.h>

#include <array>
#include <mutex>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <zero/comm/blocking.h>
#include <zero/comm/device_communicator.h>
#include <zero/comm/stream_collectives.h>
#include <zero/memory/device_kernels.h>

#ifdef ZERO_CUDA
#include <zero/comm/nccl_group.h>
#endif

namespace zero::comm {
namespace {

struct Registry {
  std::mutex mutex;
  std::array<DeviceBackend, c10::COMPILE_TIME_MAX_DEVICE_TYPES> backends;
};

Registry& registry() {
  static auto* shared = new Registry();
  return *shared;
}

DeviceBackend backend_of(c10::DeviceType type) {
  {
    const std::lock_guard lock(registry().mutex);
    if (const DeviceBackend& found = registry().backends.at(static_cast<size_t>(type))) {
      return found;
    }
  }
#ifdef ZERO_CUDA
  if (type == c10::DeviceType::CUDA) {
    return [](const auto& store, int64_t rank, int64_t size, double timeout, c10::Device device) {
      return make_nccl_backend(store, rank, size, timeout, device, /*high_priority=*/true);
    };
  }
#endif
  return nullptr;
}

// What a communicator needs to make the collectives of a device.
struct Ranks {
  std::optional<Membership> shard;
  std::optional<Membership> replicate;
  double timeout_seconds = 0.0;
  std::string transport;
  bool registered_buffers = false;

  std::unique_ptr<DeviceCollectives> make(
      c10::Device device,
      const std::shared_ptr<Communicator>& host) const {
    memory::device_kernels(device.type()); // throws where there are none
    const Place place{host->rank(), host->size(), device};
    const Place shards{host->shard_rank(), host->shard_size(), device};
    const bool wanted = transport == "nccl";
    if (!wanted && (place.size == 1 || (!shard && !replicate))) {
      return make_lone_collectives(device, place);
    }
    const DeviceBackend backend = backend_of(device.type());
    TORCH_CHECK_NOT_IMPLEMENTED(
        backend || !wanted,
        "[zero.comm] expected a build with NCCL for transport=\"nccl\" and parameters on ",
        device,
        ", got one without (rank ",
        place.rank,
        " of ",
        place.size,
        "); build with ZERO_WITH_CUDA=ON, or use transport=\"auto\"");
    if (!backend || transport == "host" || transport == "group") {
      return make_staged_collectives(host);
    }
    const BlockingScope scope;
    const auto over = [&](const std::optional<Membership>& ranks) {
      return ranks
          ? backend(
                new_store(*ranks), ranks->place.rank, ranks->place.size, timeout_seconds, device)
          : nullptr;
    };
    const auto alone = std::optional(
        Membership{c10::make_intrusive<c10d::HashStore>(), Place{}}); // NCCL of one rank
    return make_backend_collectives(
        device,
        place,
        shards,
        over(shard || replicate ? shard : alone),
        over(replicate),
        registered_buffers);
  }
};

} // namespace

void register_device_backend(c10::DeviceType type, DeviceBackend backend) {
  const std::lock_guard lock(registry().mutex);
  registry().backends.at(static_cast<size_t>(type)) = std::move(backend);
}

std::shared_ptr<Communicator> with_devices(
    std::shared_ptr<Communicator> host,
    const std::optional<Membership>& shard,
    const std::optional<Membership>& replicate,
    double timeout_seconds,
    const std::string& transport,
    bool registered_buffers) {
  if (!memory::devices_present()) {
    return host;
  }
  const Ranks ranks{shard, replicate, timeout_seconds, transport, registered_buffers};
  return std::make_shared<DeviceCommunicator>(
      std::move(host), [ranks](c10::Device device, const std::shared_ptr<Communicator>& over) {
        return ranks.make(device, over);
      });
}

} // namespace zero::comm
