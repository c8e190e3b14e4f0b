#include <zero/sharding/master_weights.h>

#include <utility>

#include <zero/memory/elements.h>
#include <zero/sharding/by_bucket.h>

namespace zero::sharding {

MasterWeights::MasterWeights(
    ParameterTable& table,
    std::shared_ptr<memory::Account> account,
    bool whole)
    : table_(table), account_(std::move(account)), whole_(whole) {}

layout::Range MasterWeights::range(int64_t bucket) const {
  return whole_ ? layout::Range{0, table_.bucket(bucket).layout.numel} : table_.shard(bucket);
}

bool MasterWeights::has(int64_t bucket) const {
  return has_bucket(masters_, bucket);
}

at::Tensor MasterWeights::make(int64_t bucket) {
  memory::FlatBuffer& made = at_bucket(masters_, bucket);
  made = memory::FlatBuffer(
      range(bucket).size(),
      table_.bucket(bucket).options.dtype(at::kFloat),
      memory::Purpose::optimizer_state,
      account_);
  return made.tensor();
}

void MasterWeights::keep(int64_t bucket, const at::Tensor& values) {
  const layout::Range own = range(bucket);
  memory::copy_elements(make(bucket), 0, values, own.begin, own.size());
}

void MasterWeights::widen(int64_t bucket) {
  const BucketEntry& entry = table_.bucket(bucket);
  const layout::Range own = range(bucket);
  memory::convert_elements(
      make(bucket), 0, entry.values.tensor(), own.begin - entry.held.begin, own.size());
}

at::Tensor MasterWeights::tensor(int64_t bucket) const {
  return has(bucket) ? masters_[bucket].tensor() : at::Tensor();
}

at::Tensor MasterWeights::view(int64_t bucket, layout::Range elements) const {
  return masters_[bucket].view(elements.begin - range(bucket).begin, elements.size());
}

void MasterWeights::publish(int64_t bucket, layout::Range elements) {
  const BucketEntry& entry = table_.bucket(bucket);
  memory::convert_elements(
      entry.values.tensor(),
      elements.begin - entry.held.begin,
      masters_[bucket].tensor(),
      elements.begin - range(bucket).begin,
      elements.size());
}

void MasterWeights::refresh(int64_t bucket, layout::Range elements) {
  const BucketEntry& entry = table_.bucket(bucket);
  const layout::Range own = layout::intersect(elements, range(bucket));
  memory::follow_elements(
      masters_[bucket].tensor(),
      own.begin - range(bucket).begin,
      entry.values.tensor(),
      own.begin - entry.held.begin,
      own.size());
}

} // namespace zero::sharding
