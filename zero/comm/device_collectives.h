#pragma once

// How tensors on a device travel: what a DeviceCommunicator does with them. Arguments
// are checked already; calls come from any thread, in the same order on all ranks.

#include <memory>
#include <string>
#include <vector>

#include <zero/comm/arguments.h>
#include <zero/comm/communicator.h>

namespace zero::comm {

class DeviceCollectives {
 public:
  virtual ~DeviceCollectives() = default;
  virtual WorkPtr reduce_scatter(const ReduceArguments& arguments, const Tag& tag) = 0;
  virtual std::vector<WorkPtr> all_gather(const std::vector<Gather>& gathers) = 0;
  virtual WorkPtr all_reduce(const ReduceArguments& arguments, const Tag& tag) = 0;
  virtual WorkPtr broadcast(const at::Tensor& tensor, int64_t root, const Tag& tag) = 0;
  // Counted here; nothing where another communicator carries them, and counts.
  virtual GroupTraffic traffic() const {
    return {};
  }
  virtual std::string describe() const = 0;
  // Memory that they read and write faster; null: none.
  virtual c10::Storage allocate(int64_t /*bytes*/) {
    return {};
  }
  // After a failure: what is on its way ends, and nothing more is started.
  virtual void abort() noexcept {}
};

// Through the host's memory and the host's communicator: with its bits, for ranks that
// share a device, and where there is nothing faster. Each call waits for the device.
std::unique_ptr<DeviceCollectives> make_staged_collectives(std::shared_ptr<Communicator> host);

} // namespace zero::comm
