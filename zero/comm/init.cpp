// The process group that a launcher's variables describe. Made once a process and
// kept until its end, on purpose without a destructor: at exit, peers may still
// use the store that rank 0 serves, and other threads the group.

#include <zero/comm/init.h>

#include <cstdlib>
#include <mutex>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <zero/comm/blocking.h>
#include <zero/comm/gloo_group.h>
#include <zero/comm/meeting.h>
#include <zero/comm/milliseconds.h>
#include <zero/comm/nccl_group.h>

namespace zero {
namespace {

bool agent_serves_store() {
  const char* value = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return value != nullptr && std::string(value) == "True";
}

c10::intrusive_ptr<c10d::Store> connect(
    const LaunchEnvironment& environment,
    double timeout_seconds) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(environment.master_port);
  options.isServer = environment.rank == 0 && !agent_serves_store();
  options.numWorkers = static_cast<std::size_t>(environment.world_size);
  options.waitWorkers = false; // make_gloo_group waits, and names who is missing
  options.timeout = comm::to_milliseconds(timeout_seconds);
  c10::intrusive_ptr<c10d::Store> store;
  try {
    store = c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options);
  } catch (const std::exception& error) {
    TORCH_CHECK_WITH(
        DistBackendError,
        false,
        "[zero.comm] expected ",
        options.isServer ? "to serve" : "to reach",
        " the store at ",
        environment.master_addr,
        ":",
        environment.master_port,
        ", got an error (rank ",
        environment.rank,
        " of ",
        environment.world_size,
        "); ",
        options.isServer ? "set MASTER_PORT to a free port of this host"
                         : "see whether rank 0 runs, and MASTER_ADDR and MASTER_PORT",
        ": ",
        error.what());
  }
  // torchrun's agent keeps its store when it restarts the workers.
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const auto attempt = restarts == nullptr ? std::string("0") : std::string(restarts);
  return c10::make_intrusive<c10d::PrefixStore>("zero/attempt/" + attempt, std::move(store));
}

// Collective. Gives the group a backend for CUDA tensors where ranks have GPUs: NCCL
// where each has one of its own, else Gloo. Which it is, every rank decides alike.
void add_cuda_backend(
    c10d::ProcessGroup& group,
    const c10::intrusive_ptr<c10d::Store>& store,
    const LaunchEnvironment& environment,
    double timeout_seconds) {
  using Type = c10d::ProcessGroup::BackendType;
  const auto gpu = comm::gpu_of(environment.local_rank);
  const auto gpus = comm::tell_all(
      *store,
      "gpus",
      environment.rank,
      environment.world_size,
      gpu ? gpu->id : std::string(),
      timeout_seconds);
  if (gpu) {
    c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).setDevice(gpu->device);
  }
  const std::string obstacle = comm::nccl_obstacle(gpus);
  if (obstacle.empty()) {
    auto backend = comm::make_nccl_backend(
        c10::make_intrusive<c10d::PrefixStore>("nccl", store),
        environment.rank,
        environment.world_size,
        timeout_seconds,
        gpu->device,
        /*high_priority=*/false);
    group.setBackend(c10::DeviceType::CUDA, Type::NCCL, backend);
  } else if (gpu) {
    group.setBackend(c10::DeviceType::CUDA, Type::GLOO, group.getBackend(c10::DeviceType::CPU));
    if (environment.local_rank == 0) {
      TORCH_WARN(
          "[zero.comm] CUDA tensors of this group go over Gloo, not NCCL: ",
          obstacle,
          "; ",
          comm::kGpuRemedy);
    }
  }
}

} // namespace

c10::intrusive_ptr<c10d::ProcessGroup> init(double timeout_seconds) {
  static auto* mutex = new std::mutex();
  static auto* group = new c10::intrusive_ptr<c10d::ProcessGroup>();
  const comm::BlockingScope scope; // before the lock, whose owner may wait for long
  const std::lock_guard lock(*mutex);
  if (!*group) {
    if (const auto environment = launch_environment()) {
      const auto store = connect(*environment, timeout_seconds);
      auto made =
          make_gloo_group(store, environment->rank, environment->world_size, timeout_seconds);
      if (comm::has_nccl()) {
        const auto prefix = comm::next_prefix(*store, "cuda", environment->rank);
        const auto own = c10::make_intrusive<c10d::PrefixStore>(prefix, store);
        add_cuda_backend(*made, own, *environment, timeout_seconds);
      }
      *group = std::move(made);
    }
  }
  return *group;
}

} // namespace zero
