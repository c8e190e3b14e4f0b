#include <zero/sharding/host_weights.h>

#include <utility>

#include <zero/comm/blocking.h>
#include <zero/sharding/by_bucket.h>

namespace zero::sharding {

HostWeights::HostWeights(ParameterTable& table, std::shared_ptr<memory::Account> account)
    : table_(table), account_(std::move(account)) {}

HostWeights::~HostWeights() {
  try {
    for (const memory::Moment& moment : sent_) {
      moment.finish(); // from memory that is let go
    }
  } catch (...) { // NOLINT(bugprone-empty-catch): the device is gone
  }
}

at::Tensor HostWeights::staging(int64_t bucket, int64_t numel) {
  Staging& taken = staging_.at(next_);
  next_ = (next_ + 1) % staging_.size();
  if (taken.bucket >= 0) {
    settle(taken.bucket);
  }
  taken.bucket = bucket;
  const auto dtype = table_.bucket(bucket).options.dtype();
  const int64_t bytes = numel * static_cast<int64_t>(dtype.itemsize());
  if (!taken.bytes || taken.bytes.tensor().numel() < bytes) {
    taken.bytes = {};
    taken.bytes =
        memory::FlatBuffer(bytes, memory::pinned(at::kByte), memory::Purpose::buffers, account_);
  }
  return memory::tensor_over(
      taken.bytes.tensor().storage(), {numel}, {1}, at::TensorOptions(dtype).device(at::kCPU));
}

void HostWeights::send(
    int64_t bucket,
    layout::Range elements,
    const at::Tensor& source,
    int64_t begin) {
  const BucketEntry& entry = table_.bucket(bucket);
  memory::Moment& sent = at_bucket(sent_, bucket);
  {
    const auto guard = stream_.enter(entry.options.device());
    memory::queue_copy(
        entry.values.tensor(), elements.begin - entry.held.begin, source, begin, elements.size());
    sent.record(entry.options.device());
  }
  sent.wait();
}

void HostWeights::settle(int64_t bucket) {
  const comm::BlockingScope blocking;
  at_bucket(sent_, bucket).finish();
}

bool HostWeights::written(int64_t parameter) const {
  const at::Tensor& tensor = table_.entry(parameter).parameter.tensor;
  return parameter >= static_cast<int64_t>(versions_.size()) ||
      versions_[parameter] != static_cast<int64_t>(tensor._version());
}

void HostWeights::note_moved() {
  for (size_t i = 0; i < versions_.size(); ++i) {
    const ParameterEntry& entry = table_.entry(static_cast<int64_t>(i));
    if (entry.flat && !entry.view.holds(entry.parameter.tensor)) {
      versions_[i] = -1;
    }
  }
}

void HostWeights::saw(int64_t parameter) {
  if (static_cast<int64_t>(versions_.size()) < table_.size()) {
    versions_.resize(table_.size(), -1);
  }
  versions_[parameter] = static_cast<int64_t>(table_.entry(parameter).parameter.tensor._version());
}

} // namespace zero::sharding
