#include <zero/comm/operation_queue.h>

#include <atomic>
#include <chrono>
#include <utility>

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <zero/comm/blocking.h>
#include <zero/comm/error_text.h>

namespace zero::comm {
namespace {

// How long a destructor lets operations in flight go on. What is left after it
// waits for a rank that is gone or busy.
constexpr std::chrono::milliseconds kDrainTime{1500};

std::exception_ptr error_with(const std::string& text) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text));
}

std::string after_failure(const std::string& failure) {
  return "[zero.comm] after an earlier failure: " + failure;
}

} // namespace

class OperationQueue::Operation final : public Work {
 public:
  Operation(std::shared_ptr<OperationQueue> queue, Opening opening, bool training, Run run)
      : opening(std::move(opening)),
        training(training),
        run(std::move(run)),
        queue_(std::move(queue)) {}

  void wait() override {
    if (!settle()) {
      queue_->told_.store(queue_->failed()); // false: of a time before a recovery
      std::rethrow_exception(error_);
    }
  }

  bool settle() noexcept override {
    if (!done()) {
      const BlockingScope scope;
      queue_->wait_for(*this);
    }
    return error_ == nullptr;
  }

  bool done() const override {
    return done_.load(std::memory_order_acquire);
  }

  // Lets go of the buffers first: who waited finds them its own again.
  void finish(std::exception_ptr error) noexcept {
    run = nullptr;
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
  }

  const Opening opening;
  const bool training;
  Run run;

 private:
  const std::shared_ptr<OperationQueue> queue_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
};

OperationQueue::OperationQueue(std::unique_ptr<Transport> transport)
    : transport_(std::move(transport)) {}

WorkPtr OperationQueue::submit(Opening opening, bool training, Run run, bool wake) {
  auto operation =
      std::make_shared<Operation>(shared_from_this(), std::move(opening), training, std::move(run));
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) {
    told_.store(true);
    TORCH_CHECK_WITH(DistBackendError, false, after_failure(failure_));
  }
  queue_.push_back(operation);
  ++submitted_;
  if (wake && !driven_) {
    work_left_.notify_one();
  }
  return operation;
}

void OperationQueue::wait_for(const Operation& operation) {
  Lock lock(mutex_);
  while (!operation.done()) {
    if (may_drive()) {
      run_next(lock);
    } else {
      changed_.wait(lock, [&] { return operation.done() || may_drive(); });
    }
  }
}

void OperationQueue::work() {
  Lock lock(mutex_);
  while (true) {
    work_left_.wait(lock, [this] { return may_drive() || (stopping_ && queue_.empty()); });
    if (queue_.empty()) {
      break;
    }
    run_next(lock);
  }
}

void OperationQueue::stop() {
  Lock lock(mutex_);
  stopping_ = true;
  work_left_.notify_one();
  changed_.wait_for(lock, kDrainTime, [this] { return queue_.empty() && !driven_; });
  lock.unlock();
  transport_->interrupt();
}

// Called, and returns, with the lock; runs the operation without it.
void OperationQueue::run_next(Lock& lock) {
  auto operation = std::move(queue_.front());
  queue_.pop_front();
  driven_ = true;
  lock.unlock();
  run(*operation);
  operation.reset();
  lock.lock();
  driven_ = false;
  changed_.notify_all();
  if (!queue_.empty() || stopping_) {
    work_left_.notify_one();
  }
}

void OperationQueue::run(Operation& operation) {
  const c10::AutoGradMode no_grad(false);
  try {
    {
      const std::lock_guard lock(mutex_);
      TORCH_CHECK_WITH(DistBackendError, failure_.empty(), after_failure(failure_));
    }
    const auto bytes = operation.run(*transport_, operation.opening);
    if (operation.training) {
      count(static_cast<Kind>(operation.opening.header.kind), bytes);
    }
    operation.finish(nullptr);
  } catch (...) {
    fail(operation, std::current_exception());
  }
}

void OperationQueue::fail(Operation& operation, std::exception_ptr error) noexcept {
  const auto text = text_of(error);
  if (!failed()) {
    // Before finish() frees buffers: nothing reads or writes them later.
    if (const auto whole = give_up(text); whole != text) {
      error = error_with(whole);
    }
  }
  operation.finish(std::move(error));
}

std::string OperationQueue::give_up(std::string why) noexcept {
  {
    const std::lock_guard lock(mutex_);
    failure_ = why;
  }
  if (const auto others = transport_->give_up(why); !others.empty()) {
    why += others;
    const std::lock_guard lock(mutex_);
    failure_ = why;
  }
  return why;
}

bool OperationQueue::failed() const {
  const std::lock_guard lock(mutex_);
  return !failure_.empty();
}

void OperationQueue::abort(const std::string& why) noexcept {
  if (!transport_->recovers()) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) {
      return;
    }
    failure_ = why;
    told_.store(true);
  }
  transport_->give_up(why);
}

bool OperationQueue::behind() const {
  const std::lock_guard lock(mutex_);
  return transport_->behind(submitted_);
}

void OperationQueue::recover() {
  if (!transport_->recovers()) {
    return;
  }
  const BlockingScope scope;
  Lock lock(mutex_);
  if (failure_.empty()) {
    if (!transport_->broken()) {
      return;
    }
    failure_ = "[zero.comm] another rank gave up";
  }
  while (driven_ || !queue_.empty()) { // what is left fails at once
    if (may_drive()) {
      run_next(lock);
    } else {
      changed_.wait(lock);
    }
  }
  driven_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    transport_->recover();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  driven_ = false;
  changed_.notify_all();
  if (error) {
    std::rethrow_exception(error);
  }
  failure_.clear();
  submitted_ = 0;
  told_.store(false);
}

void OperationQueue::count(Kind kind, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (Traffic::Count* counted = traffic_.of(kind)) {
    counted->calls += 1;
    counted->bytes += bytes;
  }
}

Traffic OperationQueue::traffic() const {
  const std::lock_guard lock(mutex_);
  return traffic_;
}

} // namespace zero::comm
