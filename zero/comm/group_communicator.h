#pragma once

// The communicator of several ranks over a private c10d backend. Its calls check
// their arguments, queue an operation and return; one worker thread runs the
// operations in the order of the calls, and sleeps when there is none. After a
// failure it disconnects, and every later call throws the first error again.

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <zero/comm/collectives.h>
#include <zero/comm/communicator.h>
#include <zero/comm/failure_board.h>
#include <zero/comm/peer_exchange.h>

namespace zero::comm {

class GroupCommunicator final : public Communicator {
 public:
  // `board` may be null.
  explicit GroupCommunicator(
      std::unique_ptr<PeerExchange> peers,
      std::shared_ptr<FailureBoard> board = nullptr);
  // Not collective. Gives operations in flight a moment, then abandons them.
  ~GroupCommunicator() override;

  int64_t rank() const override {
    return place_.rank;
  }
  int64_t size() const override {
    return place_.size;
  }
  WorkPtr reduce_scatter(at::Tensor output, at::Tensor input, Reduction reduction, Tag tag)
      override;
  WorkPtr all_gather(at::Tensor output, at::Tensor input, Tag tag) override;
  WorkPtr all_reduce(at::Tensor tensor, Reduction reduction, Tag tag) override;
  WorkPtr broadcast(at::Tensor tensor, int64_t root, Tag tag) override;
  std::vector<at::Tensor> exchange(at::Tensor bytes, Tag tag) override;
  void barrier(Tag tag) override;
  Traffic traffic() const override;

 private:
  class Operation;
  using Headers = std::vector<OperationHeader>;
  // Moves an operation's payload; returns the bytes that this rank sent.
  using Payload = std::function<int64_t(const Headers&)>;

  std::shared_ptr<Operation> submit(const OperationHeader& header, const Tag& tag, Payload payload);
  void work();
  void run(Operation& operation);
  void fail(Operation& operation, std::exception_ptr error) noexcept;
  void count(const OperationHeader& header, int64_t bytes);

  const Place place_;
  std::unique_ptr<PeerExchange> peers_; // the worker's, but for interrupt()
  ReduceScratch scratch_; // the worker's
  std::shared_ptr<FailureBoard> board_; // the worker's

  mutable std::mutex mutex_; // guards the rest
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Operation>> queue_;
  bool stopping_ = false;
  bool stopped_ = false;
  std::string failure_; // the first error; empty: none
  Traffic traffic_;

  std::thread worker_;
};

} // namespace zero::comm
