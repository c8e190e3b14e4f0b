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

void reduce(const ReduceArguments& arguments) {
  if (arguments.count == 0) {
    return;
  }
  if (arguments.divisor == 1.0 && arguments.addend_data == nullptr &&
      arguments.out_dtype == arguments.dtype) {
    if (arguments.shard != arguments.whole) {
      std::memcpy(arguments.shard, arguments.whole, arguments.shard_bytes());
    }
    return;
  }
  reduce_elements(
      arguments, arguments.shard, {arguments.whole}, arguments.addend_data, arguments.count);
}

} // namespace

WorkPtr done_work() {
  static const auto* work = new WorkPtr(std::make_shared<DoneWork>());
  return *work;
}

WorkPtr LocalCommunicator::reduce_scatter(
    at::Tensor output,
    at::Tensor input,
    Reduction reduction,
    Tag tag) {
  reduce(check_reduce_scatter({}, output, input, reduction, tag));
  traffic_.reduce_scatter.calls += tag.training ? 1 : 0;
  return done_work();
}

WorkPtr LocalCommunicator::all_gather(at::Tensor output, at::Tensor input, Tag tag) {
  const auto arguments = check_all_gather({}, output, input, tag);
  if (arguments.shard_bytes > 0 && arguments.whole != arguments.shard) {
    std::memcpy(arguments.whole, arguments.shard, arguments.shard_bytes);
  }
  traffic_.all_gather.calls += tag.training ? 1 : 0;
  return done_work();
}

WorkPtr LocalCommunicator::all_reduce(at::Tensor tensor, Reduction reduction, Tag tag) {
  reduce(check_all_reduce({}, tensor, reduction, tag));
  traffic_.all_reduce.calls += tag.training ? 1 : 0;
  return done_work();
}

WorkPtr LocalCommunicator::broadcast(at::Tensor tensor, int64_t root, Tag tag) {
  check_broadcast({}, tensor, root, tag);
  traffic_.broadcast.calls += tag.training ? 1 : 0;
  return done_work();
}

std::vector<at::Tensor> LocalCommunicator::exchange(at::Tensor bytes, Tag tag) {
  check_exchange({}, bytes, tag);
  auto copy = at::empty({bytes.numel()}, at::kByte);
  if (bytes.numel() > 0) {
    std::memcpy(copy.mutable_data_ptr(), bytes.const_data_ptr(), bytes.numel());
  }
  return {copy};
}

void LocalCommunicator::barrier(Tag) {}

Traffic LocalCommunicator::traffic() const {
  return traffic_;
}

} // namespace zero::comm
