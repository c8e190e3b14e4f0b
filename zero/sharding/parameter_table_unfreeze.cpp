// ParameterTable's frozen parameters that are unfrozen later: see [Note: freezing] in
// docs/design.md.

#include <zero/sharding/parameter_table.h>

#include <algorithm>

namespace zero::sharding {

void ParameterTable::check_converted(const ParameterEntry& entry) const {
  TORCH_CHECK_TYPE(
      entry.parameter.tensor.scalar_type() == entry.dtype,
      "[zero.sharding] parameter '",
      entry.parameter.name,
      "' was frozen when it was wrapped, converted and then unfrozen: expected ",
      entry.dtype,
      ", found ",
      entry.parameter.tensor.scalar_type(),
      " (rank ",
      rank_,
      " of ",
      world_size_,
      "); convert the model before wrapping it");
}

std::vector<int64_t> ParameterTable::unfreeze(const std::vector<int64_t>& indices) {
  std::vector<int64_t> buckets;
  if (sharded_) {
    for (const int64_t index : indices) {
      const int64_t bucket = entries_[index].slot.bucket;
      if (std::find(buckets.begin(), buckets.end(), bucket) == buckets.end()) {
        buckets.push_back(bucket);
      }
    }
    for (const int64_t bucket : buckets) {
      BucketEntry& entry = buckets_[bucket];
      for (const int64_t index : entry.layout.parameters) {
        entries_[index].trainable = true;
      }
      entry.trainable = true;
      entry.masters = keeps_masters(entries_[entry.layout.parameters.front()]);
    }
    return buckets;
  }
  for (const int64_t index : indices) {
    check_converted(entries_[index]);
  }
  for (const int64_t index : indices) {
    ParameterEntry& entry = entries_[index];
    entry.trainable = true;
    entry.flat = true;
    account_->add(
        memory::Purpose::parameters, -static_cast<int64_t>(entry.parameter.tensor.nbytes()));
  }
  const int64_t first = bucket_count();
  lay_out(indices);
  for (int64_t bucket = first; bucket < bucket_count(); ++bucket) {
    buckets_[bucket].narrowed = false; // they have the dtype that they compute in
    adopt(bucket);
    buckets.push_back(bucket);
  }
  return buckets;
}

} // namespace zero::sharding
