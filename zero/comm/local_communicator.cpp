// See local_communicator.h. Arguments are checked as for several ranks, so that a
// program that runs on one rank doesn't fail on two for their sake.

#include <zero/comm/local_communicator.h>

#include <cstring>

#include <ATen/ops/empty.h>

#include <zero/comm/arguments.h>
#include <zero/comm/reduce_elements.h>

namespace zero::comm {
namespace {

class DoneWork final : public Work {
 public:
  void wait() override {}
  bool done() const override {
    return true;
  }
  bool settle() noexcept override {
    return true;
  }
};

void reduce(const ReduceArguments& arguments, int64_t rank) {
  if (arguments.count == 0) {
    return;
  }
  const char* own = arguments.whole + rank * arguments.shard_bytes();
  if (arguments.divisor == 1.0 && arguments.addend_data == nullptr &&
      arguments.out_dtype == arguments.dtype) {
    if (arguments.shard != own) {
      std::memcpy(arguments.shard, own, arguments.shard_bytes());
    }
    return;
  }
  reduce_elements(arguments, arguments.shard, {own}, arguments.addend_data, arguments.count);
}

} // namespace

WorkPtr done_work() {
  static const auto* work = new WorkPtr(std::make_shared<DoneWork>());
  return *work;
}

void LocalCommunicator::count(Kind kind, const Tag& tag, int64_t bytes) {
  if (tag.training) {
    Traffic::Count* counted = traffic_.of(kind);
    counted->calls += 1;
    counted->bytes += bytes;
  }
}

WorkPtr LocalCommunicator::reduce_scatter(
    at::Tensor output,
    at::Tensor input,
    Reduction reduction,
    Tag tag) {
  const auto arguments = check_reduce_scatter(place_, output, input, reduction, tag);
  reduce(arguments, place_.rank);
  count(Kind::reduce_scatter, tag, (place_.size - 1) * arguments.shard_bytes());
  return done_work();
}

WorkPtr LocalCommunicator::all_gather(at::Tensor output, at::Tensor input, Tag tag) {
  const auto arguments = check_all_gather(place_, output, input, tag);
  char* own = arguments.whole + place_.rank * arguments.shard_bytes;
  if (arguments.shard_bytes > 0 && own != arguments.shard) {
    std::memcpy(own, arguments.shard, arguments.shard_bytes);
  }
  count(Kind::all_gather, tag, (place_.size - 1) * arguments.shard_bytes);
  return done_work();
}

WorkPtr LocalCommunicator::all_reduce(at::Tensor tensor, Reduction reduction, Tag tag) {
  const auto arguments = check_all_reduce(place_, tensor, reduction, tag);
  reduce(arguments, place_.rank);
  count(Kind::all_reduce, tag, 2 * (place_.size - 1) * arguments.shard_bytes());
  return done_work();
}

WorkPtr LocalCommunicator::broadcast(at::Tensor tensor, int64_t root, Tag tag) {
  check_broadcast(place_, tensor, root, tag);
  const bool sends = place_.rank == root;
  count(
      Kind::broadcast, tag, sends ? (place_.size - 1) * static_cast<int64_t>(tensor.nbytes()) : 0);
  return done_work();
}

std::vector<at::Tensor> LocalCommunicator::exchange(at::Tensor bytes, Tag tag) {
  check_exchange(place_, bytes, tag);
  std::vector<at::Tensor> messages;
  for (int64_t rank = 0; rank < place_.size; ++rank) {
    messages.push_back(at::empty({bytes.numel()}, at::kByte));
    if (bytes.numel() > 0) {
      std::memcpy(messages.back().mutable_data_ptr(), bytes.const_data_ptr(), bytes.numel());
    }
  }
  return messages;
}

void LocalCommunicator::barrier(Tag) {}

Traffic LocalCommunicator::traffic() const {
  return traffic_;
}

std::string LocalCommunicator::transport() const {
  return place_.size == 1 ? "none (one rank)" : "fake (" + std::to_string(place_.size) + " ranks)";
}

} // namespace zero::comm
