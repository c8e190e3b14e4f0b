// Collectives of a device's tensors by way of the host: copied there, carried by the
// host's communicator, and copied back, all before the call returns.

#include <utility>

#include <ATen/ops/empty.h>

#include <zero/comm/blocking.h>
#include <zero/comm/device_collectives.h>
#include <zero/comm/local_communicator.h>
#include <zero/memory/device_streams.h>

namespace zero::comm {
namespace {

class StagedCollectives final : public DeviceCollectives {
 public:
  explicit StagedCollectives(std::shared_ptr<Communicator> host) : host_(std::move(host)) {}

  WorkPtr reduce_scatter(const ReduceArguments& arguments, const Tag& tag) override {
    const at::Tensor output = at::empty({arguments.count}, arguments.out_dtype);
    host_->reduce_scatter(output, on_host(arguments.input), reduction_of(arguments), tag)->wait();
    return take(arguments.output, output);
  }

  std::vector<WorkPtr> all_gather(const std::vector<Gather>& gathers) override {
    std::vector<WorkPtr> works;
    for (const Gather& gather : gathers) {
      const at::Tensor output = at::empty({gather.output.numel()}, gather.output.scalar_type());
      host_->all_gather(output, on_host(gather.input), gather.tag)->wait();
      works.push_back(take(gather.output, output));
    }
    return works;
  }

  WorkPtr all_reduce(const ReduceArguments& arguments, const Tag& tag) override {
    const at::Tensor tensor = on_host(arguments.output);
    host_->all_reduce(tensor, reduction_of(arguments), tag)->wait();
    return take(arguments.output, tensor);
  }

  WorkPtr broadcast(const at::Tensor& given, int64_t root, const Tag& tag) override {
    const at::Tensor tensor = on_host(given);
    host_->broadcast(tensor, root, tag)->wait();
    return take(given, tensor);
  }

  std::string describe() const override {
    return "through the host";
  }

 private:
  static at::Tensor on_host(const at::Tensor& tensor) {
    const memory::Quiet quiet;
    const BlockingScope scope;
    return tensor.to(at::kCPU);
  }

  static Reduction reduction_of(const ReduceArguments& arguments) {
    const bool adds = arguments.addend.defined();
    return {arguments.divisor, adds ? on_host(arguments.addend) : at::Tensor()};
  }

  static WorkPtr take(const at::Tensor& target, const at::Tensor& values) {
    const memory::Quiet quiet;
    target.copy_(values.view(target.sizes()));
    return done_work();
  }

  const std::shared_ptr<Communicator> host_;
};

} // namespace

std::unique_ptr<DeviceCollectives> make_staged_collectives(std::shared_ptr<Communicator> host) {
  return std::make_unique<StagedCollectives>(std::move(host));
}

} // namespace zero::comm
