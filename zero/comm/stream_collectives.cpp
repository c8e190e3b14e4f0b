#include <zero/comm/stream_collectives.h>

#include <utility>

#include <c10/core/StreamGuard.h>

#include <zero/comm/local_communicator.h>
#include <zero/memory/device_streams.h>

namespace zero::comm {
namespace {

// In flight until it was waited for. Keeps the memory of its tensors.
class StreamWork final : public Work {
 public:
  StreamWork(std::shared_ptr<EventPool> pool, c10::Event end, std::vector<at::Tensor> tensors)
      : pool_(std::move(pool)), end_(std::move(end)), tensors_(std::move(tensors)) {}
  ~StreamWork() override {
    settle();
    pool_->give(std::move(end_));
  }
  StreamWork(const StreamWork&) = delete;
  StreamWork& operator=(const StreamWork&) = delete;

  void wait() override {
    end_.block(memory::current_stream(end_.device()));
    tensors_.clear();
  }
  bool done() const override {
    return end_.query();
  }
  bool settle() noexcept override {
    if (!tensors_.empty()) {
      wait();
    }
    return true;
  }

 private:
  const std::shared_ptr<EventPool> pool_;
  c10::Event end_;
  std::vector<at::Tensor> tensors_;
};

} // namespace

c10::Event EventPool::take() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    return c10::Event(type_);
  }
  c10::Event event = std::move(free_.back());
  free_.pop_back();
  return event;
}

void EventPool::give(c10::Event event) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(event));
}

StreamCollectives::StreamCollectives(
    c10::Device device,
    const Place& place,
    const Place& shards,
    bool own_stream)
    : device_(device),
      place_(place),
      shards_(shards),
      stream_(own_stream ? std::optional(memory::high_priority_stream(device)) : std::nullopt),
      events_(std::make_shared<EventPool>(device.type())),
      begin_(device.type()) {}

template <typename Body>
WorkPtr StreamCollectives::run(std::vector<at::Tensor> tensors, const Body& body) {
  const memory::Quiet quiet;
  if (!stream_) {
    body();
    return done_work();
  }
  const std::lock_guard lock(mutex_);
  begin_.record(memory::current_stream(device_));
  begin_.block(*stream_);
  c10::Event end = events_->take();
  {
    const c10::StreamGuard guard(*stream_);
    body();
    end.record(*stream_);
  }
  return std::make_shared<StreamWork>(events_, std::move(end), std::move(tensors));
}

void StreamCollectives::count(Kind kind, const Tag& tag, int64_t bytes, int64_t between_replicas) {
  if (!tag.training) {
    return;
  }
  const std::lock_guard lock(mutex_);
  Traffic::Count* shard = traffic_.shard.of(kind);
  shard->calls += 1;
  shard->bytes += bytes;
  if (between_replicas > 0) {
    Traffic::Count& replicate = traffic_.replicate.all_reduce;
    replicate.calls += 1;
    replicate.bytes += between_replicas;
  }
}

WorkPtr StreamCollectives::reduce_scatter(const ReduceArguments& arguments, const Tag& tag) {
  count(
      Kind::reduce_scatter,
      tag,
      (shards_.size - 1) * arguments.shard_bytes(),
      bytes_between_replicas(arguments));
  return run(
      {arguments.output, arguments.input, arguments.addend}, [&] { do_reduce_scatter(arguments); });
}

// One operation, and one event, for all.
std::vector<WorkPtr> StreamCollectives::all_gather(const std::vector<Gather>& gathers) {
  std::vector<at::Tensor> tensors;
  for (const Gather& gather : gathers) {
    count(
        Kind::all_gather,
        gather.tag,
        (shards_.size - 1) * static_cast<int64_t>(gather.input.nbytes()),
        0);
    tensors.push_back(gather.output);
    tensors.push_back(gather.input);
  }
  const WorkPtr work = run(std::move(tensors), [&] { do_all_gather(gathers); });
  return std::vector<WorkPtr>(gathers.size(), work);
}

WorkPtr StreamCollectives::all_reduce(const ReduceArguments& arguments, const Tag& tag) {
  count(
      Kind::all_reduce,
      tag,
      2 * (shards_.size - 1) * arguments.shard_bytes(),
      bytes_between_replicas(arguments));
  return run({arguments.output, arguments.addend}, [&] { do_all_reduce(arguments); });
}

WorkPtr StreamCollectives::broadcast(const at::Tensor& tensor, int64_t root, const Tag& tag) {
  const bool sends = place_.rank == root;
  count(
      Kind::broadcast,
      tag,
      sends ? (place_.size - 1) * static_cast<int64_t>(tensor.nbytes()) : 0,
      0);
  return run({tensor}, [&] { do_broadcast(tensor, root); });
}

GroupTraffic StreamCollectives::traffic() const {
  const std::lock_guard lock(mutex_);
  return traffic_;
}

} // namespace zero::comm
