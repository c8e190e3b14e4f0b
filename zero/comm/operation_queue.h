#pragma once

// The operations of one communicator, in the order of their calls. One at a time
// runs, on whichever thread drives: a worker that sleeps when there is none, or a
// thread that waits for one and finds nobody driving, which saves it two wake-ups.
// After a failure operations fail with the first error, until recover().

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <zero/comm/communicator.h>
#include <zero/comm/transport.h>

namespace zero::comm {

class OperationQueue : public std::enable_shared_from_this<OperationQueue> {
 public:
  // Runs an operation; returns the bytes that this rank sent.
  using Run = std::function<int64_t(Transport&, const Opening&)>;

  explicit OperationQueue(std::unique_ptr<Transport> transport);

  // `wake`: the worker may run it; else the caller is about to wait for it.
  WorkPtr submit(Opening opening, bool training, Run run, bool wake = true);

  // The worker's loop, until stop() and the queue is empty.
  void work();
  // Gives operations in flight a moment, then makes them fail.
  void stop();

  const Transport& transport() const {
    return *transport_;
  }
  // It failed, a caller was told, and the transport can start anew.
  bool recoverable() const {
    return told_.load(std::memory_order_relaxed) && transport_->recovers();
  }
  // Nothing that was submitted until now will succeed.
  void abort(const std::string& why) noexcept;
  void recover();
  bool recovers() const {
    return transport_->recovers();
  }
  // Whether a peer waits for an operation that was not submitted here.
  bool behind() const;
  Traffic traffic() const;

 private:
  class Operation;
  using OperationPtr = std::shared_ptr<Operation>;
  using Lock = std::unique_lock<std::mutex>;

  void wait_for(const Operation& operation);
  bool may_drive() const {
    return !driven_ && !queue_.empty();
  }
  void run_next(Lock& lock);
  void run(Operation& operation);
  void fail(Operation& operation, std::exception_ptr error) noexcept;
  std::string give_up(std::string why) noexcept;
  bool failed() const;
  void count(Kind kind, int64_t bytes);

  const std::unique_ptr<Transport> transport_; // the driver's
  std::atomic<bool> told_ = false; // somebody got the failure as an exception

  mutable std::mutex mutex_; // guards the rest
  std::condition_variable work_left_; // for the worker
  std::condition_variable changed_; // for those that wait
  std::deque<OperationPtr> queue_;
  bool driven_ = false; // some thread is in run()
  bool stopping_ = false;
  int64_t submitted_ = 0; // since the last recovery
  std::string failure_; // the first error; empty: none
  Traffic traffic_;
};

} // namespace zero::comm
