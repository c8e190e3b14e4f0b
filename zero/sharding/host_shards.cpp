#include <zero/sharding/host_shards.h>

#include <utility>

#include <zero/comm/blocking.h>

namespace zero::sharding {
namespace {

// A gather that was queued behind copies, and perhaps on their stream.
class GatherOfCopies final : public comm::Work {
 public:
  GatherOfCopies(comm::WorkPtr work, std::shared_ptr<const memory::Moment> queued)
      : work_(std::move(work)), queued_(std::move(queued)) {}
  void wait() override {
    work_->wait();
    queued_->wait();
  }
  bool done() const override {
    return work_->done() && queued_->passed();
  }
  bool settle() noexcept override {
    queued_->wait();
    return work_->settle();
  }

 private:
  const comm::WorkPtr work_;
  const std::shared_ptr<const memory::Moment> queued_;
};

} // namespace

HostShards::HostShards(ParameterTable& table, std::shared_ptr<memory::Account> account)
    : table_(table), account_(std::move(account)) {}

HostShards::~HostShards() {
  try {
    read_.finish();
  } catch (...) { // NOLINT(bugprone-empty-catch): the device is gone
  }
}

void HostShards::take(int64_t bucket) {
  memory::FlatBuffer& values = table_.bucket(bucket).values;
  const at::Tensor& before = values.tensor();
  memory::FlatBuffer taken(
      before.numel(), memory::pinned(before.scalar_type()), memory::Purpose::parameters, account_);
  memory::copy_elements(taken.tensor(), 0, before, 0, before.numel());
  values = std::move(taken);
}

std::vector<comm::WorkPtr> HostShards::gather(
    comm::Communicator& communicator,
    std::vector<comm::Gather> gathers) {
  if (gathers.empty()) {
    return {};
  }
  const c10::Device device = gathers.front().output.device();
  const auto guard = stream_.enter(device);
  for (comm::Gather& gather : gathers) {
    const layout::Range own = table_.shard(gather.tag.id);
    at::Tensor place = memory::flat_view(gather.output, own.begin, own.size());
    memory::queue_copy(place, 0, gather.input, 0, own.size());
    gather.input = std::move(place);
  }
  read_.record(device);
  std::vector<comm::WorkPtr> works;
  try {
    works = communicator.all_gather_together(std::move(gathers));
  } catch (...) {
    read_.finish(); // the slabs are given back
    throw;
  }
  const auto queued = std::make_shared<memory::Moment>();
  queued->record(device);
  for (comm::WorkPtr& work : works) {
    work = std::make_shared<GatherOfCopies>(std::move(work), queued);
  }
  return works;
}

void HostShards::settle() {
  const comm::BlockingScope blocking;
  read_.finish();
}

} // namespace zero::sharding
