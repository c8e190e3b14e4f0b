// The process group that a launcher's variables describe. Made once a process and
// kept until its end, on purpose without a destructor: at exit, peers may still
// use the store that rank 0 serves, and other threads the group.

#include <zero/comm/init.h>

#include <cstdlib>
#include <mutex>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <zero/comm/blocking.h>
#include <zero/comm/milliseconds.h>

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

} // namespace

c10::intrusive_ptr<c10d::ProcessGroup> init(double timeout_seconds) {
  static auto* mutex = new std::mutex();
  static auto* group = new c10::intrusive_ptr<c10d::ProcessGroup>();
  const comm::BlockingScope scope; // before the lock, whose owner may wait for long
  const std::lock_guard lock(*mutex);
  if (!*group) {
    if (const auto environment = launch_environment()) {
      *group = make_gloo_group(
          connect(*environment, timeout_seconds),
          environment->rank,
          environment->world_size,
          timeout_seconds);
    }
  }
  return *group;
}

} // namespace zero
