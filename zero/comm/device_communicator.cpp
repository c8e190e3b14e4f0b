#include <zero/comm/device_communicator.h>

#include <cstdlib>
#include <utility>

#include <c10/util/Exception.h>

#include <zero/comm/operation_header.h>

namespace zero::comm {
namespace {

bool debugging() {
  const char* value = std::getenv("ZERO_DEBUG");
  return value != nullptr && std::string(value) == "1";
}

} // namespace

// Of the CPU's memory the host's, of a device's that of its collectives, once there are
// any. It may outlive the communicator.
class DeviceCommunicator::Buffers final : public memory::BufferSource {
 public:
  explicit Buffers(std::shared_ptr<memory::BufferSource> host) : host_(std::move(host)) {}

  c10::Storage allocate(int64_t bytes) override {
    return host_ ? host_->allocate(bytes) : c10::Storage();
  }
  c10::Storage allocate_on(c10::Device /*device*/, int64_t bytes) override {
    const std::lock_guard lock(mutex_);
    const auto collectives = collectives_.lock();
    return collectives ? collectives->allocate(bytes) : c10::Storage();
  }
  void take_from(const std::shared_ptr<DeviceCollectives>& collectives) {
    const std::lock_guard lock(mutex_);
    collectives_ = collectives;
  }

 private:
  const std::shared_ptr<memory::BufferSource> host_;
  std::mutex mutex_;
  std::weak_ptr<DeviceCollectives> collectives_;
};

DeviceCommunicator::DeviceCommunicator(std::shared_ptr<Communicator> host, Make make)
    : host_(std::move(host)),
      make_(std::move(make)),
      compares_(debugging()),
      buffers_(std::make_shared<Buffers>(host_->buffers())) {}

// All ranks come here with the same operation.
DeviceCollectives& DeviceCommunicator::collectives(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  if (!collectives_) {
    collectives_ = make_(tensor.device(), host_);
    buffers_->take_from(collectives_);
  }
  return *collectives_;
}

Place DeviceCommunicator::place(const at::Tensor& tensor, bool shard) const {
  return {
      shard ? host_->shard_rank() : host_->rank(),
      shard ? host_->shard_size() : host_->size(),
      tensor.device()};
}

// Queued operations that differ between ranks would wait for each other until the
// device's timeout, without names.
void DeviceCommunicator::compare(Kind kind, const Tag& tag, int64_t bytes) {
  if (compares_) {
    const std::string what = describe(kind, tag) + ", " + std::to_string(bytes) + " bytes";
    host_->barrier({what, tag.id, tag.step, false});
  }
}

// A peer that failed doesn't come to what is queued on the device.
template <typename Call>
auto DeviceCommunicator::over_host(const Call& call) -> decltype(call()) {
  try {
    return call();
  } catch (const c10::DistBackendError&) {
    const std::lock_guard lock(mutex_);
    if (collectives_) {
      collectives_->abort();
    }
    throw;
  }
}

WorkPtr DeviceCommunicator::reduce_scatter(
    at::Tensor output,
    at::Tensor input,
    Reduction reduction,
    Tag tag) {
  if (input.is_cpu()) {
    return host_->reduce_scatter(
        std::move(output), std::move(input), std::move(reduction), std::move(tag));
  }
  const auto arguments = check_reduce_scatter(place(input, true), output, input, reduction, tag);
  compare(Kind::reduce_scatter, tag, arguments.shard_bytes());
  return collectives(input).reduce_scatter(arguments, tag);
}

WorkPtr DeviceCommunicator::all_gather(at::Tensor output, at::Tensor input, Tag tag) {
  return all_gather_together({{std::move(output), std::move(input), std::move(tag)}}).front();
}

std::vector<WorkPtr> DeviceCommunicator::all_gather_together(std::vector<Gather> gathers) {
  if (gathers.empty() || gathers.front().input.is_cpu()) {
    return host_->all_gather_together(std::move(gathers));
  }
  for (const Gather& gather : gathers) {
    const auto arguments = check_all_gather(
        place(gathers.front().input, true), gather.output, gather.input, gather.tag);
    compare(Kind::all_gather, gather.tag, arguments.shard_bytes);
  }
  return collectives(gathers.front().input).all_gather(gathers);
}

WorkPtr DeviceCommunicator::all_reduce(at::Tensor tensor, Reduction reduction, Tag tag) {
  if (tensor.is_cpu()) {
    return host_->all_reduce(std::move(tensor), std::move(reduction), std::move(tag));
  }
  const auto arguments = check_all_reduce(place(tensor, true), tensor, reduction, tag);
  compare(Kind::all_reduce, tag, arguments.shard_bytes());
  return collectives(tensor).all_reduce(arguments, tag);
}

WorkPtr DeviceCommunicator::broadcast(at::Tensor tensor, int64_t root, Tag tag) {
  if (tensor.is_cpu()) {
    return host_->broadcast(std::move(tensor), root, std::move(tag));
  }
  check_broadcast(place(tensor, false), tensor, root, tag);
  compare(Kind::broadcast, tag, static_cast<int64_t>(tensor.nbytes()));
  return collectives(tensor).broadcast(tensor, root, tag);
}

std::vector<at::Tensor> DeviceCommunicator::exchange(at::Tensor bytes, Tag tag) {
  return over_host([&] { return host_->exchange(std::move(bytes), std::move(tag)); });
}

std::vector<at::Tensor> DeviceCommunicator::exchange_shards(at::Tensor bytes, Tag tag) {
  return over_host([&] { return host_->exchange_shards(std::move(bytes), std::move(tag)); });
}

void DeviceCommunicator::barrier(Tag tag) {
  over_host([&] { host_->barrier(std::move(tag)); });
}

Traffic DeviceCommunicator::traffic() const {
  const GroupTraffic traffic = group_traffic();
  return traffic.shard + traffic.replicate;
}

GroupTraffic DeviceCommunicator::group_traffic() const {
  const GroupTraffic host = host_->group_traffic();
  const std::lock_guard lock(mutex_);
  return host + before_ + (collectives_ ? collectives_->traffic() : GroupTraffic());
}

std::shared_ptr<memory::BufferSource> DeviceCommunicator::buffers() const {
  return buffers_;
}

std::string DeviceCommunicator::transport() const {
  const std::lock_guard lock(mutex_);
  return collectives_ ? collectives_->describe() + "; messages: " + host_->transport()
                      : host_->transport();
}

void DeviceCommunicator::abort(const std::string& why) noexcept {
  host_->abort(why);
  const std::lock_guard lock(mutex_);
  if (collectives_ && host_->recovers()) {
    collectives_->abort();
  }
}

void DeviceCommunicator::recover() {
  host_->recover();
  const std::lock_guard lock(mutex_);
  if (collectives_) {
    before_ = before_ + collectives_->traffic();
    collectives_ = nullptr;
  }
}

} // namespace zero::comm
