// The queue, the worker and the failure state; the algorithms are in collectives.

#include <zero/comm/group_communicator.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <zero/comm/blocking.h>
#include <zero/comm/sigpipe.h>

namespace zero::comm {
namespace {

// How long a destructor lets operations in flight go on. What is left after it
// waits for a rank that is gone or busy.
constexpr std::chrono::milliseconds kDrainTime{1500};

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& other) {
    return other.what();
  } catch (...) {
    return "an unknown error";
  }
}

std::string after_failure(const std::string& failure) {
  return "[zero.comm] after an earlier failure: " + failure;
}

} // namespace

class GroupCommunicator::Operation final : public Work {
 public:
  Operation(const OperationHeader& header, const Tag& tag, Payload payload)
      : header(header),
        description(describe(static_cast<Kind>(header.kind), tag)),
        training(tag.training),
        payload(std::move(payload)) {}

  void wait() override {
    if (!done()) {
      const BlockingScope scope;
      std::unique_lock lock(mutex_);
      finished_.wait(lock, [this] { return done(); });
    }
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

  bool done() const override {
    return done_.load(std::memory_order_acquire);
  }

  // Lets go of the buffers first: who waited finds them its own again.
  void finish(std::exception_ptr error) noexcept {
    payload = nullptr;
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
    finished_.notify_all();
  }

  const OperationHeader header;
  const std::string description;
  const bool training;
  Payload payload;

 private:
  std::mutex mutex_;
  std::condition_variable finished_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
};

GroupCommunicator::GroupCommunicator(
    std::unique_ptr<PeerExchange> peers,
    std::shared_ptr<FailureBoard> board)
    : place_{peers->rank(), peers->size()},
      peers_(std::move(peers)),
      board_(std::move(board)),
      worker_([this] { work(); }) {}

GroupCommunicator::~GroupCommunicator() {
  const BlockingScope scope;
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, kDrainTime, [this] { return stopped_; });
  }
  peers_->interrupt();
  worker_.join();
}

std::shared_ptr<GroupCommunicator::Operation>
GroupCommunicator::submit(const OperationHeader& header, const Tag& tag, Payload payload) {
  auto operation = std::make_shared<Operation>(header, tag, std::move(payload));
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, failure_.empty(), after_failure(failure_));
  queue_.push_back(operation);
  changed_.notify_all();
  return operation;
}

void GroupCommunicator::work() {
  c10::setThreadName("zero_comm");
  const SigpipeBlock no_sigpipe;
  c10::AutoGradMode no_grad(false);
  at::internal::lazy_init_num_threads(); // or ATen's first loop would undo the next line
#ifdef _OPENMP
  omp_set_num_threads(1); // the model computes meanwhile, and messages are slower than one core
#endif
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) {
      break;
    }
    auto operation = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    run(*operation);
    operation.reset();
    lock.lock();
  }
  stopped_ = true;
  changed_.notify_all();
}

void GroupCommunicator::run(Operation& operation) {
  try {
    {
      const std::lock_guard lock(mutex_);
      TORCH_CHECK_WITH(DistBackendError, failure_.empty(), after_failure(failure_));
    }
    const auto headers = peers_->open(operation.header, operation.description);
    const auto bytes = operation.payload(headers);
    peers_->close();
    if (operation.training) {
      count(operation.header, bytes);
    }
    operation.finish(nullptr);
  } catch (...) {
    fail(operation, std::current_exception());
  }
}

void GroupCommunicator::fail(Operation& operation, std::exception_ptr error) noexcept {
  bool is_first = false;
  auto text = text_of(error);
  {
    const std::lock_guard lock(mutex_);
    is_first = failure_.empty();
    if (is_first) {
      failure_ = text;
    }
  }
  if (is_first) {
    // Disconnected before finish() frees buffers: nothing writes into them later.
    peers_->give_up(text);
    const auto others = board_ ? board_->post(text) : std::string();
    if (!others.empty()) {
      text += others;
      error = std::make_exception_ptr(
          c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text));
      const std::lock_guard lock(mutex_);
      failure_ = text;
    }
  }
  operation.finish(std::move(error));
}

void GroupCommunicator::count(const OperationHeader& header, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto add = [bytes](Traffic::Count& count) {
    count.calls += 1;
    count.bytes += bytes;
  };
  switch (static_cast<Kind>(header.kind)) {
  case Kind::reduce_scatter:
    return add(traffic_.reduce_scatter);
  case Kind::all_gather:
    return add(traffic_.all_gather);
  case Kind::all_reduce:
    return add(traffic_.all_reduce);
  case Kind::broadcast:
    return add(traffic_.broadcast);
  case Kind::barrier:
  case Kind::exchange:
    return; // control messages
  }
}

Traffic GroupCommunicator::traffic() const {
  const std::lock_guard lock(mutex_);
  return traffic_;
}

WorkPtr GroupCommunicator::reduce_scatter(
    at::Tensor output,
    at::Tensor input,
    Reduction reduction,
    Tag tag) {
  auto arguments = check_reduce_scatter(place_, output, input, reduction, tag);
  auto header = make_header(Kind::reduce_scatter, tag, arguments.shard_bytes());
  header.dtype = static_cast<int32_t>(arguments.dtype);
  header.divisor = arguments.divisor;
  return submit(header, tag, [this, arguments = std::move(arguments)](const Headers&) {
    return comm::reduce_scatter(*peers_, arguments, scratch_);
  });
}

WorkPtr GroupCommunicator::all_gather(at::Tensor output, at::Tensor input, Tag tag) {
  auto arguments = check_all_gather(place_, output, input, tag);
  const auto header = make_header(Kind::all_gather, tag, arguments.shard_bytes);
  return submit(header, tag, [this, arguments = std::move(arguments)](const Headers&) {
    return comm::all_gather(*peers_, arguments);
  });
}

WorkPtr GroupCommunicator::all_reduce(at::Tensor tensor, Reduction reduction, Tag tag) {
  auto arguments = check_all_reduce(place_, tensor, reduction, tag);
  auto header = make_header(Kind::all_reduce, tag, arguments.shard_bytes());
  header.dtype = static_cast<int32_t>(arguments.dtype);
  header.divisor = arguments.divisor;
  return submit(header, tag, [this, arguments = std::move(arguments)](const Headers&) {
    const auto reduced = comm::reduce_scatter(*peers_, arguments, scratch_);
    const GatherArguments gather{
        .input = arguments.output,
        .output = arguments.output,
        .shard = arguments.shard,
        .whole = const_cast<char*>(arguments.whole), // the same buffer as the output
        .shard_bytes = arguments.shard_bytes()};
    return reduced + comm::all_gather(*peers_, gather);
  });
}

WorkPtr GroupCommunicator::broadcast(at::Tensor tensor, int64_t root, Tag tag) {
  check_broadcast(place_, tensor, root, tag);
  auto header = make_header(Kind::broadcast, tag, static_cast<int64_t>(tensor.nbytes()));
  header.root = static_cast<int32_t>(root);
  return submit(header, tag, [this, tensor = std::move(tensor), root](const Headers&) {
    return comm::broadcast(*peers_, tensor, root);
  });
}

std::vector<at::Tensor> GroupCommunicator::exchange(at::Tensor bytes, Tag tag) {
  check_exchange(place_, bytes, tag);
  auto header = make_header(Kind::exchange, tag, bytes.numel());
  if (bytes.numel() > 0 && bytes.numel() <= static_cast<int64_t>(OperationHeader::kInlineSize)) {
    std::memcpy(header.inline_payload(), bytes.const_data_ptr(), bytes.numel());
  }
  // Shared: an operation that fails may outlive this frame's interest in it.
  auto messages = std::make_shared<std::vector<at::Tensor>>();
  submit(header, tag, [this, messages, bytes = std::move(bytes)](const Headers& headers) {
    *messages = comm::exchange(*peers_, bytes, headers);
    return int64_t{0};
  })->wait();
  return std::move(*messages);
}

void GroupCommunicator::barrier(Tag tag) {
  submit(make_header(Kind::barrier, tag, 0), tag, [](const Headers&) {
    return int64_t{0};
  })->wait();
}

} // namespace zero::comm
