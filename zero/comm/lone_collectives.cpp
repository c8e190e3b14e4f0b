#include <zero/comm/device_reduce.h>
#include <zero/comm/stream_collectives.h>
#include <zero/memory/flat_buffer.h>

namespace zero::comm {
namespace {

class LoneCollectives final : public StreamCollectives {
 public:
  // One rank's work is not worth a stream.
  LoneCollectives(c10::Device device, const Place& place)
      : StreamCollectives(device, place, place, /*own_stream=*/place.size > 1) {}

  std::string describe() const override {
    return place_.size == 1 ? "none (one rank)"
                            : "fake (" + std::to_string(place_.size) + " ranks)";
  }

 protected:
  void do_reduce_scatter(const ReduceArguments& arguments) override {
    const at::Tensor own = slice(arguments.input, arguments.count);
    const bool done = own.const_data_ptr() == arguments.output.const_data_ptr() &&
        arguments.divisor == 1.0 && !arguments.addend.defined();
    if (!done) {
      reduce_on_device(own, 1, arguments.output, arguments.addend, arguments.divisor);
    }
  }

  void do_all_gather(const std::vector<Gather>& gathers) override {
    for (const Gather& gather : gathers) {
      copy_on_device(slice(gather.output, gather.input.numel()), gather.input);
    }
  }

  void do_all_reduce(const ReduceArguments& arguments) override {
    ReduceArguments own = arguments;
    own.output = slice(arguments.output, arguments.count);
    do_reduce_scatter(own);
  }

  void do_broadcast(const at::Tensor& /*tensor*/, int64_t /*root*/) override {}

 private:
  at::Tensor slice(const at::Tensor& whole, int64_t count) const {
    return memory::flat_view(whole, place_.rank * count, count);
  }
};

} // namespace

std::unique_ptr<DeviceCollectives> make_lone_collectives(c10::Device device, const Place& place) {
  return std::make_unique<LoneCollectives>(device, place);
}

} // namespace zero::comm
