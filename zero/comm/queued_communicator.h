#pragma once

// A Communicator over a Transport: calls check their arguments, queue an operation
// and return. Holds the queue and the thread that works on it.

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include <zero/comm/communicator.h>
#include <zero/comm/operation_queue.h>

namespace zero::comm {

class QueuedCommunicator final : public Communicator {
 public:
  // `another`: what duplicate() does.
  using Another = std::function<std::shared_ptr<Communicator>()>;
  explicit QueuedCommunicator(std::unique_ptr<Transport> transport, Another another = nullptr);
  // Not collective. Gives operations in flight a moment, then abandons them.
  ~QueuedCommunicator() override;

  int64_t rank() const override {
    return place_.rank;
  }
  int64_t size() const override {
    return place_.size;
  }
  int64_t shard_rank() const override {
    return shard_place_.rank;
  }
  int64_t shard_size() const override {
    return shard_place_.size;
  }
  WorkPtr reduce_scatter(at::Tensor output, at::Tensor input, Reduction reduction, Tag tag)
      override;
  WorkPtr all_gather(at::Tensor output, at::Tensor input, Tag tag) override;
  WorkPtr all_reduce(at::Tensor tensor, Reduction reduction, Tag tag) override;
  WorkPtr broadcast(at::Tensor tensor, int64_t root, Tag tag) override;
  std::vector<at::Tensor> exchange(at::Tensor bytes, Tag tag) override;
  std::vector<at::Tensor> exchange_shards(at::Tensor bytes, Tag tag) override;
  void barrier(Tag tag) override;
  Traffic traffic() const override;
  GroupTraffic group_traffic() const override;
  std::string transport() const override;
  std::shared_ptr<memory::BufferSource> buffers() const override;
  std::shared_ptr<Communicator> duplicate() const override;
  bool recovers() const override {
    return queue_->recovers();
  }
  bool behind() const override {
    return queue_->behind();
  }
  bool recoverable() const override;
  void abort(const std::string& why) noexcept override;
  void recover() override;

 private:
  WorkPtr
  submit(const OperationHeader& header, const Tag& tag, OperationQueue::Run run, bool wake = true);
  using Exchange = std::vector<at::Tensor> (Transport::*)(const Opening&, const at::Tensor&);
  std::vector<at::Tensor> exchange_by(Exchange exchange, at::Tensor bytes, const Tag& tag);

  const Place place_;
  const Place shard_place_;
  const int64_t process_; // in a forked child there is no worker
  const Another another_;
  const std::shared_ptr<OperationQueue> queue_;
  std::thread worker_;
};

} // namespace zero::comm
