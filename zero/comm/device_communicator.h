#pragma once

// A communicator for models on a device: tensors there travel by the device's own
// collectives, which are made when the first one comes; tensors on the CPU, messages and
// errors by the host's communicator.

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <zero/comm/device_collectives.h>

namespace zero::comm {

class DeviceCommunicator final : public Communicator {
 public:
  // `make`: [collective] the collectives of a device.
  using Make = std::function<std::unique_ptr<DeviceCollectives>(
      c10::Device device,
      const std::shared_ptr<Communicator>& host)>;
  DeviceCommunicator(std::shared_ptr<Communicator> host, Make make);

  int64_t rank() const override {
    return host_->rank();
  }
  int64_t size() const override {
    return host_->size();
  }
  int64_t shard_rank() const override {
    return host_->shard_rank();
  }
  int64_t shard_size() const override {
    return host_->shard_size();
  }
  WorkPtr reduce_scatter(at::Tensor output, at::Tensor input, Reduction reduction, Tag tag)
      override;
  WorkPtr all_gather(at::Tensor output, at::Tensor input, Tag tag) override;
  std::vector<WorkPtr> all_gather_together(std::vector<Gather> gathers) override;
  WorkPtr all_reduce(at::Tensor tensor, Reduction reduction, Tag tag) override;
  WorkPtr broadcast(at::Tensor tensor, int64_t root, Tag tag) override;
  std::vector<at::Tensor> exchange(at::Tensor bytes, Tag tag) override;
  std::vector<at::Tensor> exchange_shards(at::Tensor bytes, Tag tag) override;
  void barrier(Tag tag) override;
  Traffic traffic() const override;
  GroupTraffic group_traffic() const override;
  std::string transport() const override;
  std::shared_ptr<memory::BufferSource> buffers() const override;
  // Of messages: over the host.
  std::shared_ptr<Communicator> duplicate() const override {
    return host_->duplicate();
  }
  bool recovers() const override {
    return host_->recovers();
  }
  bool behind() const override {
    return host_->behind();
  }
  bool recoverable() const override {
    return host_->recoverable();
  }
  void abort(const std::string& why) noexcept override;
  // The device's collectives are made anew.
  void recover() override;

 private:
  class Buffers;
  DeviceCollectives& collectives(const at::Tensor& tensor);
  Place place(const at::Tensor& tensor, bool shard) const;
  void compare(Kind kind, const Tag& tag, int64_t bytes);
  template <typename Call>
  auto over_host(const Call& call) -> decltype(call());

  const std::shared_ptr<Communicator> host_;
  const Make make_;
  const bool compares_; // every operation, by a message of the hosts: ZERO_DEBUG=1
  const std::shared_ptr<Buffers> buffers_;
  mutable std::mutex mutex_; // guards the rest
  std::shared_ptr<DeviceCollectives> collectives_;
  GroupTraffic before_; // the last recovery
};

} // namespace zero::comm
