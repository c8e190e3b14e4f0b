// Gloo from C++ alone. The only translation unit that includes
// ProcessGroupGloo.hpp, and with it the headers of gloo_shim/ (see the note in
// gloo_shim/gloo/algorithm.h). Runs on the caller's thread.

#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif

#include <zero/comm/gloo_group.h>

#include <chrono>
#include <cstdlib>
#include <limits>
#include <sstream>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <zero/comm/blocking.h>
#include <zero/comm/init.h>
#include <zero/comm/meeting.h>
#include <zero/comm/milliseconds.h>
#include <zero/comm/sigpipe.h>

namespace zero {
namespace comm {
namespace {

using Gloo = c10d::ProcessGroupGloo;

std::vector<std::shared_ptr<gloo::transport::Device>> make_devices() {
  std::vector<std::shared_ptr<gloo::transport::Device>> devices;
  if (const char* names = std::getenv("GLOO_SOCKET_IFNAME")) {
    std::istringstream list(names);
    for (std::string name; std::getline(list, name, ',');) {
      if (!name.empty()) {
        devices.push_back(Gloo::createDeviceForInterface(name));
      }
    }
  }
  if (devices.empty()) {
    devices.push_back(Gloo::createDefaultDevice());
  }
  return devices;
}

} // namespace

std::string next_prefix(c10d::Store& store, const std::string& name, int64_t rank) {
  const auto count = store.add("zero/" + name + "/count/" + std::to_string(rank), 1);
  return "zero/" + name + "/" + std::to_string(count);
}

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store,
    int64_t rank,
    int64_t size,
    double timeout_seconds) {
  // Gloo's own complaint about a rank that is missing names an address or a key.
  tell_all(*store, "here", rank, size, "x", timeout_seconds);
  const SigpipeBlock inherited_by_gloo;
  auto options = Gloo::Options::create(to_milliseconds(timeout_seconds));
  options->devices = make_devices();
  options->threads = 1; // they run c10d's collectives; send and recv need none
  try {
    return c10::make_intrusive<Gloo>(
        store, static_cast<int>(rank), static_cast<int>(size), std::move(options));
  } catch (const std::exception& error) {
    TORCH_CHECK_WITH(
        DistBackendError,
        false,
        "[zero.comm] expected Gloo to connect ",
        size,
        " ranks, got an error (rank ",
        rank,
        " of ",
        size,
        "); if the hosts have several networks, name the interface in GLOO_SOCKET_IFNAME: ",
        error.what());
  }
}

} // namespace comm

c10::intrusive_ptr<c10d::ProcessGroup> make_gloo_group(
    const c10::intrusive_ptr<c10d::Store>& store,
    int64_t rank,
    int64_t world_size,
    double timeout_seconds) {
  TORCH_CHECK_VALUE(store, "[zero.comm] expected a c10d::Store to meet at, got null");
  TORCH_CHECK_VALUE(
      0 <= rank && rank < world_size && world_size <= std::numeric_limits<int>::max(),
      "[zero.comm] expected 0 <= rank < world_size, got rank ",
      rank,
      " of ",
      world_size);
  const comm::BlockingScope scope;
  auto own_store =
      c10::make_intrusive<c10d::PrefixStore>(comm::next_prefix(*store, "group", rank), store);
  auto backend = comm::make_gloo_backend(own_store, rank, world_size, timeout_seconds);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(
      own_store, static_cast<int>(rank), static_cast<int>(world_size));
  constexpr auto type = c10d::ProcessGroup::BackendType::GLOO;
  group->setBackend(c10::DeviceType::CPU, type, backend);
  group->setDefaultBackend(type);
  group->setGroupName("zero");
  return group;
}

} // namespace zero
