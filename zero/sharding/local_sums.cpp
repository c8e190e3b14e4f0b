#include <zero/sharding/local_sums.h>

#include <utility>

#include <zero/sharding/by_bucket.h>

namespace zero::sharding {

bool LocalSums::wants(int64_t index) const {
  const ParameterEntry& entry = table_.entry(index);
  return memory::has_16_bits(table_.bucket(entry.slot.bucket).options.dtype());
}

// The user may have written to what is shown.
void LocalSums::take_out(int64_t index, const at::Tensor& whole) {
  const layout::Slot& slot = table_.entry(index).slot;
  memory::follow_elements(sums_[slot.bucket].tensor(), slot.offset, whole, slot.offset, slot.numel);
  memory::zero_elements(whole, slot.offset, slot.numel);
}

void LocalSums::add(int64_t index, const at::Tensor& whole) {
  const layout::Slot& slot = table_.entry(index).slot;
  memory::FlatBuffer& sums = at_bucket(sums_, slot.bucket);
  if (!sums) {
    sums = memory::FlatBuffer(
        whole.numel(), whole.options().dtype(at::kFloat), memory::Purpose::gradients, account_);
  }
  if (summed_.insert(index).second) {
    memory::convert_elements(sums.tensor(), slot.offset, whole, slot.offset, slot.numel);
  } else {
    memory::accumulate_elements(sums.tensor(), slot.offset, whole, slot.offset, slot.numel);
    memory::convert_elements(whole, slot.offset, sums.tensor(), slot.offset, slot.numel);
  }
}

at::Tensor LocalSums::seal(int64_t bucket, const at::Tensor& whole) {
  bool any = false;
  for (const int64_t index : table_.bucket(bucket).layout.parameters) {
    any = any || has(index);
  }
  if (!any) {
    return {};
  }
  const memory::FlatBuffer sums = std::move(sums_[bucket]);
  sums_[bucket] = {};
  for (const int64_t index : table_.bucket(bucket).layout.parameters) {
    const layout::Slot& slot = table_.entry(index).slot;
    if (summed_.erase(index) > 0) {
      memory::follow_elements(sums.tensor(), slot.offset, whole, slot.offset, slot.numel);
    } else {
      memory::convert_elements(sums.tensor(), slot.offset, whole, slot.offset, slot.numel);
    }
  }
  return sums.tensor();
}

} // namespace zero::sharding
