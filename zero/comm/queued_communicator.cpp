#include <zero/comm/queued_communicator.h>

#include <unistd.h>

#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <ATen/Parallel.h>
#include <c10/util/thread_name.h>

#include <zero/comm/blocking.h>

namespace zero::comm {
namespace {

void work_on(OperationQueue& queue) {
  c10::setThreadName("zero_comm");
  at::internal::lazy_init_num_threads(); // or ATen's first loop would undo the next line
#ifdef _OPENMP
  omp_set_num_threads(1); // the model computes meanwhile
#endif
  queue.work();
}

OperationHeader make_header(Kind kind, const Tag& tag, const ReduceArguments& arguments) {
  auto header = comm::make_header(kind, tag, arguments.shard_bytes());
  header.dtype = static_cast<int32_t>(arguments.dtype);
  header.divisor = arguments.divisor;
  return header;
}

} // namespace

QueuedCommunicator::QueuedCommunicator(std::unique_ptr<Transport> transport, Another another)
    : place_(transport->place()),
      shard_place_(transport->shard_place()),
      process_(getpid()),
      another_(std::move(another)),
      queue_(std::make_shared<OperationQueue>(std::move(transport))),
      worker_([queue = queue_] { work_on(*queue); }) {}

std::shared_ptr<Communicator> QueuedCommunicator::duplicate() const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      another_, "[zero.comm] expected a communicator of a process group to duplicate");
  return another_();
}

QueuedCommunicator::~QueuedCommunicator() {
  if (getpid() != process_) {
    worker_.detach(); // it exists in the parent only
    return;
  }
  const BlockingScope scope;
  queue_->stop();
  worker_.join();
}

WorkPtr QueuedCommunicator::submit(
    const OperationHeader& header,
    const Tag& tag,
    OperationQueue::Run run,
    bool wake) {
  return queue_->submit(
      {header, describe(static_cast<Kind>(header.kind), tag), tag.training},
      tag.training,
      std::move(run),
      wake);
}

WorkPtr QueuedCommunicator::reduce_scatter(
    at::Tensor output,
    at::Tensor input,
    Reduction reduction,
    Tag tag) {
  auto arguments = check_reduce_scatter(shard_place_, output, input, reduction, tag);
  const auto header = make_header(Kind::reduce_scatter, tag, arguments);
  return submit(
      header,
      tag,
      [arguments = std::move(arguments)](Transport& transport, const Opening& opening) {
        return transport.reduce_scatter(opening, arguments);
      });
}

WorkPtr QueuedCommunicator::all_gather(at::Tensor output, at::Tensor input, Tag tag) {
  auto arguments = check_all_gather(shard_place_, output, input, tag);
  const auto header = make_header(Kind::all_gather, tag, arguments.shard_bytes);
  return submit(
      header,
      tag,
      [arguments = std::move(arguments)](Transport& transport, const Opening& opening) {
        return transport.all_gather(opening, arguments);
      });
}

WorkPtr QueuedCommunicator::all_reduce(at::Tensor tensor, Reduction reduction, Tag tag) {
  auto arguments = check_all_reduce(shard_place_, tensor, reduction, tag);
  const auto header = make_header(Kind::all_reduce, tag, arguments);
  return submit(
      header,
      tag,
      [arguments = std::move(arguments)](Transport& transport, const Opening& opening) {
        return transport.all_reduce(opening, arguments);
      });
}

WorkPtr QueuedCommunicator::broadcast(at::Tensor tensor, int64_t root, Tag tag) {
  check_broadcast(place_, tensor, root, tag);
  auto header = make_header(Kind::broadcast, tag, static_cast<int64_t>(tensor.nbytes()));
  header.root = static_cast<int32_t>(root);
  return submit(
      header,
      tag,
      [tensor = std::move(tensor), root](Transport& transport, const Opening& opening) {
        return transport.broadcast(opening, tensor, root);
      });
}

std::vector<at::Tensor>
QueuedCommunicator::exchange_by(Exchange exchange, at::Tensor bytes, const Tag& tag) {
  check_exchange(place_, bytes, tag);
  const auto header = make_header(Kind::exchange, tag, bytes.numel());
  // Shared: an operation that fails may outlive this frame's interest in it.
  auto messages = std::make_shared<std::vector<at::Tensor>>();
  submit(
      header,
      tag,
      [messages, exchange, bytes = std::move(bytes)](Transport& transport, const Opening& opening) {
        *messages = (transport.*exchange)(opening, bytes);
        return int64_t{0};
      },
      /*wake=*/false)
      ->wait();
  return std::move(*messages);
}

std::vector<at::Tensor> QueuedCommunicator::exchange(at::Tensor bytes, Tag tag) {
  return exchange_by(&Transport::exchange, std::move(bytes), tag);
}

std::vector<at::Tensor> QueuedCommunicator::exchange_shards(at::Tensor bytes, Tag tag) {
  return exchange_by(&Transport::exchange_shards, std::move(bytes), tag);
}

void QueuedCommunicator::barrier(Tag tag) {
  submit(
      make_header(Kind::barrier, tag, 0),
      tag,
      [](Transport& transport, const Opening& opening) {
        transport.barrier(opening);
        return int64_t{0};
      },
      /*wake=*/false)
      ->wait();
}

Traffic QueuedCommunicator::traffic() const {
  const auto by_group = queue_->transport().group_traffic();
  return by_group ? by_group->shard + by_group->replicate : queue_->traffic();
}

GroupTraffic QueuedCommunicator::group_traffic() const {
  return queue_->transport().group_traffic().value_or(GroupTraffic{traffic(), {}});
}

std::string QueuedCommunicator::transport() const {
  return queue_->transport().describe();
}

std::shared_ptr<memory::BufferSource> QueuedCommunicator::buffers() const {
  return queue_->transport().buffers();
}

bool QueuedCommunicator::recoverable() const {
  return queue_->recoverable();
}

void QueuedCommunicator::abort(const std::string& why) noexcept {
  queue_->abort("[zero.comm] " + why);
}

void QueuedCommunicator::recover() {
  queue_->recover();
}

} // namespace zero::comm
