#include "fake_backend.h"

#include <mutex>
#include <numeric>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "fake_collectives.h"

namespace zero::fake {

// What is queued at once.
struct Batch {
  std::vector<Part> parts;
  std::vector<Ranges> ranges; // by part
  std::vector<at::Tensor> tensors;
  c10::DeviceIndex device = -1;
  bool async = true;
  c10d::OpType type = c10d::OpType::COALESCED;
};

namespace {

c10d::OpType type_of(const std::string& name) {
  if (name == "_allgather_base") {
    return c10d::OpType::_ALLGATHER_BASE;
  }
  if (name == "_reduce_scatter_base") {
    return c10d::OpType::_REDUCE_SCATTER_BASE;
  }
  if (name == "allreduce") {
    return c10d::OpType::ALLREDUCE;
  }
  if (name == "broadcast") {
    return c10d::OpType::BROADCAST;
  }
  return name == "barrier" ? c10d::OpType::BARRIER : c10d::OpType::ALLTOALL_BASE;
}

class FakeWork final : public c10d::Work {
 public:
  FakeWork(
      int rank,
      c10d::OpType type,
      std::shared_ptr<Collective> collective,
      Point end,
      c10::Stream stream,
      std::vector<at::Tensor> tensors)
      : Work(rank, type),
        collective_(std::move(collective)),
        end_(std::move(end)),
        stream_(stream),
        tensors_(std::move(tensors)) {}

  // Nobody waited: the tensors are kept from reuse as the watchdog of NCCL's group does.
  ~FakeWork() override {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
    for (const auto& tensor : tensors_) {
      guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
    }
  }

  bool isCompleted() override {
    auto& machine = Machine::get();
    const auto lock = machine.lock();
    if (collective_->done) {
      machine.host_knows_locked(stream_.device_index(), end_);
    }
    return collective_->done;
  }
  bool isSuccess() const override {
    const auto lock = Machine::get().lock();
    return collective_->done && collective_->error.empty();
  }
  std::exception_ptr exception() const override {
    const auto lock = Machine::get().lock();
    return collective_->error.empty()
        ? nullptr
        : std::make_exception_ptr(
              c10::DistBackendError(
                  c10::SourceLocation{__func__, __FILE__, __LINE__}, collective_->error));
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  bool wait(std::chrono::milliseconds) override {
    {
      auto& machine = Machine::get();
      auto lock = machine.lock();
      const auto index = stream_.device_index();
      TORCH_CHECK_WITH(DistBackendError, collective_->error.empty(), collective_->error);
      machine.wait_locked(machine.stream_locked(current_stream(index)), end_, -1);
      if (opType_ == c10d::OpType::BARRIER) {
        machine.synchronize_locked(lock, index, end_, "barrier", -1, stream_.id());
      }
    }
    tensors_.clear();
    return true;
  }

 private:
  const std::shared_ptr<Collective> collective_;
  const Point end_;
  const c10::Stream stream_;
  std::vector<at::Tensor> tensors_;
};

void check_tensor(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK_VALUE(
      tensor.device().type() == c10::DeviceType::PrivateUse1 && tensor.is_contiguous(),
      name,
      ": expected contiguous tensors on a fake device, got one on ",
      tensor.device());
}

Part part_of(std::string name, const at::Tensor& output, const at::Tensor& input, int64_t count) {
  check_tensor(output, name);
  check_tensor(input, name);
  TORCH_CHECK_TYPE(
      output.scalar_type() == input.scalar_type(),
      name,
      ": expected one dtype, got ",
      input.scalar_type(),
      " and ",
      output.scalar_type());
  Part part;
  part.name = std::move(name);
  part.dtype = input.scalar_type();
  part.count = count;
  part.input = range_of(input).begin;
  part.output = const_cast<char*>(range_of(output).begin);
  return part;
}

void check_count(const char* name, int64_t whole, int64_t shard, int64_t size) {
  TORCH_CHECK_VALUE(
      whole == shard * size, name, ": expected ", size, " x ", shard, " elements, got ", whole);
}

std::vector<int64_t> splits(std::vector<int64_t> given, const at::Tensor& tensor, int64_t size) {
  if (given.empty()) {
    TORCH_CHECK_VALUE(tensor.numel() % size == 0, "alltoall_base: uneven without split sizes");
    return std::vector<int64_t>(size, tensor.numel() / size);
  }
  const int64_t row = tensor.size(0) == 0 ? 0 : tensor.numel() / tensor.size(0);
  TORCH_CHECK_VALUE(
      std::accumulate(given.begin(), given.end(), int64_t(0)) == tensor.size(0),
      "alltoall_base: split sizes don't add up to the tensor's first dimension");
  for (auto& count : given) {
    count *= row;
  }
  return given;
}

struct Meetings {
  std::mutex mutex;
  std::vector<std::shared_ptr<Meeting>> all;
};

Meetings& meetings() {
  static auto* made = new Meetings;
  return *made;
}

} // namespace

FakeBackend::FakeBackend(std::shared_ptr<Meeting> meeting, int rank, int size, bool high_priority)
    : Backend(rank, size),
      meeting_(std::move(meeting)),
      high_priority_(high_priority),
      streams_(device_count, -1) {}

FakeBackend::~FakeBackend() = default;

void FakeBackend::startCoalescing() {
  TORCH_CHECK(coalesced_ == nullptr, "startCoalescing within startCoalescing");
  coalesced_ = std::make_unique<Batch>();
}

c10::intrusive_ptr<c10d::Work> FakeBackend::endCoalescing() {
  TORCH_CHECK(coalesced_ != nullptr, "endCoalescing without startCoalescing");
  Batch batch = std::move(*coalesced_);
  coalesced_.reset();
  return batch.parts.empty() ? nullptr : queue(std::move(batch));
}

c10::intrusive_ptr<c10d::Work> FakeBackend::add(
    Part part,
    std::vector<at::Tensor> reads,
    std::vector<at::Tensor> writes,
    bool async) {
  Batch single;
  Batch& batch = coalesced_ ? *coalesced_ : single;
  const auto index = writes.at(0).device().index();
  TORCH_CHECK(
      batch.parts.empty() || (batch.device == index && batch.async == async),
      "coalesced collectives have one device and one asyncOp");
  batch.device = index;
  batch.async = async;
  batch.type = coalesced_ ? c10d::OpType::COALESCED : type_of(part.name);
  batch.parts.push_back(std::move(part));
  batch.ranges.emplace_back();
  for (const auto& tensor : reads) {
    batch.ranges.back().reads.push_back(range_of(tensor));
    batch.tensors.push_back(tensor);
  }
  for (const auto& tensor : writes) {
    batch.ranges.back().writes.push_back(range_of(tensor));
    batch.tensors.push_back(tensor);
  }
  return coalesced_ ? nullptr : queue(std::move(single));
}

c10::intrusive_ptr<c10d::Work> FakeBackend::queue(Batch batch) {
  auto& machine = Machine::get();
  const auto index = batch.device;
  auto& own = streams_.at(index);
  if (batch.async && own < 0) {
    own = new_stream(index, high_priority_).id();
  }
  const auto here = current_stream(index);
  const c10::Stream where =
      batch.async ? c10::Stream(c10::Stream::UNSAFE, device(index), own) : here;
  auto lock = machine.lock();
  auto& stream = machine.stream_locked(where);
  if (batch.async) {
    machine.wait_locked(stream, machine.point_locked(machine.stream_locked(here), -1), -1);
  }
  const auto collective = meeting_->collective_locked(sequence_++);
  Queued call{std::move(batch.parts), {}, {}, &stream};
  try {
    for (size_t i = 0; i < call.parts.size(); ++i) {
      machine.launch_locked(lock, stream, call.parts[i].name, batch.ranges[i], /*deferred=*/true);
      const auto& [reads, writes] = batch.ranges[i];
      call.ranges.reads.insert(call.ranges.reads.end(), reads.begin(), reads.end());
      call.ranges.writes.insert(call.ranges.writes.end(), writes.begin(), writes.end());
    }
    call.after = std::exchange(stream.pending, {collective});
    collective->queue_locked(getRank(), std::move(call));
  } catch (const c10::Error& error) {
    collective->fail_locked(error.what_without_backtrace());
    throw;
  }
  Meeting::progress_locked();
  const Point end{stream.clock, {collective}, -1};
  if (!batch.async) {
    return nullptr;
  }
  return c10::make_intrusive<FakeWork>(
      getRank(), batch.type, collective, end, where, std::move(batch.tensors));
}

c10::intrusive_ptr<c10d::Work> FakeBackend::_allgather_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  check_count("_allgather_base", output.numel(), input.numel(), getSize());
  std::vector<at::Tensor> writes{output};
  const int64_t count = input.numel();
  const int64_t before = getRank() * count;
  if (range_of(input).begin == range_of(output).begin + before * input.itemsize()) {
    // In place: this rank's slice stays as it is.
    const at::Tensor flat = output.flatten();
    writes = {
        flat.narrow(0, 0, before), flat.narrow(0, before + count, flat.numel() - before - count)};
  }
  return add(
      part_of("_allgather_base", output, input, count),
      {input},
      std::move(writes),
      options.asyncOp);
}

c10::intrusive_ptr<c10d::Work> FakeBackend::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  check_count("_reduce_scatter_base", input.numel(), output.numel(), getSize());
  Part part = part_of("_reduce_scatter_base", output, input, output.numel());
  part.reduction = options.reduceOp;
  return add(std::move(part), {input}, {output}, options.asyncOp);
}

c10::intrusive_ptr<c10d::Work> FakeBackend::allreduce(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = tensors.at(0);
  Part part = part_of("allreduce", tensor, tensor, tensor.numel());
  part.reduction = options.reduceOp;
  return add(std::move(part), {tensor}, {tensor}, options.asyncOp);
}

c10::intrusive_ptr<c10d::Work> FakeBackend::broadcast(
    std::vector<at::Tensor>& tensors,
    const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = tensors.at(0);
  Part part = part_of("broadcast", tensor, tensor, tensor.numel());
  part.root = options.rootRank;
  const bool root = options.rootRank == getRank();
  return add(
      std::move(part),
      root ? std::vector{tensor} : std::vector<at::Tensor>{},
      {tensor},
      options.asyncOp);
}

c10::intrusive_ptr<c10d::Work> FakeBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_sizes,
    std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  Part part = part_of("alltoall_base", output, input, 0);
  part.sends = splits(input_sizes, input, getSize());
  part.receives = splits(output_sizes, output, getSize());
  return add(std::move(part), {input}, {output}, options.asyncOp);
}

c10::intrusive_ptr<c10d::Work> FakeBackend::barrier(const c10d::BarrierOptions& options) {
  const auto index = options.device ? options.device->index() : current_device();
  const at::Tensor nothing = at::empty({1}, at::TensorOptions(device(index)));
  Part part = part_of("barrier", nothing, nothing, 1);
  const auto work = add(std::move(part), {}, {nothing}, options.asyncOp);
  if (!options.asyncOp) {
    current_stream(index).synchronize();
  }
  return work;
}

c10::intrusive_ptr<FakeBackend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store,
    int64_t rank,
    int64_t size,
    bool high_priority) {
  const auto call = store->add("fake_backend/calls/" + std::to_string(rank), 1);
  const auto key = "fake_backend/" + std::to_string(call);
  auto& [mutex, all] = meetings();
  if (rank == 0) {
    const std::lock_guard lock(mutex);
    all.push_back(std::make_shared<Meeting>(size));
    store->set(key, std::to_string(all.size() - 1));
  }
  const auto number = store->get_to_str(key);
  const std::lock_guard lock(mutex);
  return c10::make_intrusive<FakeBackend>(
      all.at(std::stoul(number)), static_cast<int>(rank), static_cast<int>(size), high_priority);
}

c10::intrusive_ptr<c10d::ProcessGroup>
make_group(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(
      store, static_cast<int>(rank), static_cast<int>(size));
  group->setBackend(
      c10::DeviceType::PrivateUse1,
      c10d::ProcessGroup::BackendType::CUSTOM,
      make_backend(store, rank, size));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

} // namespace zero::fake
