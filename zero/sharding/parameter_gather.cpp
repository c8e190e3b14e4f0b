#include <zero/sharding/parameter_gather.h>

#include <unistd.h>

#include <exception>
#include <utility>

#include <c10/util/Exception.h>

#include <zero/comm/blocking.h>
#include <zero/comm/error_text.h>

namespace zero::sharding {
namespace {

// A gather that could not be started.
class Refused final : public comm::Work {
 public:
  explicit Refused(std::exception_ptr error) : error_(std::move(error)) {}
  void wait() override {
    std::rethrow_exception(error_);
  }
  bool done() const override {
    return true;
  }
  bool settle() noexcept override {
    return false;
  }

 private:
  std::exception_ptr error_;
};

} // namespace

ParameterGather::ParameterGather(
    ParameterTable& table,
    std::shared_ptr<comm::Communicator> communicator,
    std::function<void(bool)> on_flight,
    std::function<void()> before_wait)
    : table_(table),
      communicator_(std::move(communicator)),
      on_flight_(std::move(on_flight)),
      before_wait_(std::move(before_wait)),
      process_(getpid()) {}

ParameterGather::~ParameterGather() {
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  for (size_t b = 0; b < entries_.size(); ++b) {
    if (!entries_[b].work) {
      continue;
    }
    if (getpid() == process_) {
      entries_[b].work->settle();
    }
    land(static_cast<int64_t>(b));
  }
}

std::string ParameterGather::message(int64_t parameter) const {
  return "[zero.sharding] parameter '" + table_.entry(parameter).parameter.name +
      "' is being gathered after a step (rank " + std::to_string(table_.rank()) + " of " +
      std::to_string(table_.world_size()) +
      ") and this access cannot wait for it; call the optimizer's synchronize() first, or read it "
      "with a tensor operation";
}

void ParameterGather::start(int64_t bucket, int64_t step, bool training) {
  const std::lock_guard lock(mutex_);
  if (entries_.size() <= static_cast<size_t>(bucket)) {
    entries_.resize(table_.bucket_count());
  }
  Entry& entry = entries_[bucket];
  if (!entry.flight) {
    entry.flight = std::make_unique<Flight>(*this, bucket);
  }
  BucketEntry& gathered = table_.bucket(bucket);
  const layout::Range shard = table_.shard(bucket);
  try {
    entry.work = communicator_->all_gather(
        gathered.values.tensor(),
        gathered.values.view(shard.begin, shard.size()),
        {gathered.what, bucket, step, training});
  } catch (const c10::DistBackendError&) {
    entry.work = std::make_shared<Refused>(std::current_exception());
  }
  for (const int64_t index : gathered.layout.parameters) {
    table_.entry(index).view.close(message(index), entry.flight.get());
  }
  if (++in_flight_ == 1) {
    on_flight_(true);
  }
}

void ParameterGather::land(int64_t bucket) {
  for (const int64_t index : table_.bucket(bucket).layout.parameters) {
    table_.entry(index).view.open();
  }
  entries_[bucket].work = nullptr;
  if (--in_flight_ == 0) {
    on_flight_(false);
  }
}

void ParameterGather::wait(int64_t bucket) {
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  if (static_cast<size_t>(bucket) < entries_.size() && entries_[bucket].work) {
    entries_[bucket].work->wait();
    land(bucket);
  }
}

void ParameterGather::wait_all() {
  for (size_t b = 0; b < entries_.size(); ++b) {
    wait(static_cast<int64_t>(b));
  }
}

std::vector<bool> ParameterGather::failed() {
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  std::vector<bool> failed(table_.bucket_count());
  for (size_t b = 0; b < entries_.size(); ++b) {
    if (entries_[b].work) {
      failed[b] = !entries_[b].work->settle();
    }
  }
  return failed;
}

void ParameterGather::restart(int64_t bucket, int64_t step) {
  {
    const std::lock_guard lock(mutex_);
    if (static_cast<size_t>(bucket) < entries_.size() && entries_[bucket].work) {
      entries_[bucket].work->settle();
      land(bucket);
    }
  }
  start(bucket, step);
}

void ParameterGather::fail(int64_t bucket, const char* operation, const std::string& cause) {
  const std::lock_guard lock(mutex_);
  for (const int64_t index : table_.bucket(bucket).layout.parameters) {
    memory::SlabView& view = table_.entry(index).view;
    if (view.closed()) {
      view.set_message(
          "[zero.sharding] gathering parameter '" + table_.entry(index).parameter.name + "' for " +
          operation + " failed: " + cause);
    }
  }
}

bool ParameterGather::Flight::before_use(const char* operation) noexcept {
  if (getpid() != gather_.process_) {
    return true; // the operation raises the view's own message
  }
  try {
    gather_.before_wait_();
    gather_.wait(bucket_);
    return true;
  } catch (...) {
    try {
      gather_.fail(bucket_, operation, comm::text_of(std::current_exception()));
    } catch (...) { // NOLINT(bugprone-empty-catch): the view's own message stays
    }
  }
  return false;
}

} // namespace zero::sharding
