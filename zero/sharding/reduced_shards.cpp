#include <zero/sharding/reduced_shards.h>

#include <zero/memory/elements.h>

namespace zero::sharding {

using memory::has_16_bits;

void zero_part(const at::Tensor& part, layout::Range held, layout::Range slot) {
  const layout::Range own = layout::intersect(slot, held);
  memory::zero_elements(part, own.begin - held.begin, own.size());
}

void take_part(
    const at::Tensor& part,
    layout::Range held,
    layout::Range slot,
    const at::Tensor& source,
    int64_t source_begin) {
  const layout::Range own = layout::intersect(slot, held);
  memory::convert_elements(
      part, own.begin - held.begin, source, source_begin + own.begin - slot.begin, own.size());
}

c10::ScalarType GradientContext::reduced_dtype(int64_t bucket) const {
  const auto dtype = table.bucket(bucket).options.dtype().toScalarType();
  if (!reduce_dtype || dtype == at::kDouble) {
    return dtype;
  }
  const bool both = has_16_bits(table.bucket(bucket).options.dtype()) &&
      has_16_bits(c10::scalarTypeToTypeMeta(*reduce_dtype));
  return both ? dtype : *reduce_dtype;
}

std::shared_ptr<memory::SlabPool> make_pool(const GradientContext& context) {
  return std::make_shared<memory::SlabPool>(context.account, context.communicator->buffers());
}

layout::Range ReducedShards::range(int64_t bucket) const {
  return whole_ ? layout::Range{0, context_.table.bucket(bucket).layout.numel}
                : context_.table.shard(bucket);
}

memory::FlatBuffer ReducedShards::make(int64_t bucket, c10::ScalarType dtype) const {
  return {
      range(bucket).size(),
      context_.table.bucket(bucket).options.dtype(dtype),
      memory::Purpose::gradients,
      context_.account,
      whole_ ? context_.communicator->buffers().get() : nullptr};
}

const at::Tensor& ReducedShards::at(int64_t bucket) {
  memory::FlatBuffer& item = at_bucket(items_, bucket);
  if (!item) {
    item = make(bucket, context_.reduced_dtype(bucket));
  }
  return item.tensor();
}

const at::Tensor& ReducedShards::target(int64_t bucket, bool add) {
  memory::FlatBuffer& item = at_bucket(items_, bucket);
  const auto reduced = context_.reduced_dtype(bucket);
  if (add && (!item || has_16_bits(item.tensor().dtype()))) {
    const bool widen = has_16_bits(c10::scalarTypeToTypeMeta(reduced));
    memory::FlatBuffer sums = make(bucket, widen ? at::kFloat : reduced);
    if (item) {
      memory::convert_elements(sums.tensor(), 0, item.tensor(), 0, item.tensor().numel());
    }
    item = std::move(sums);
  } else if (!add && (!item || item.tensor().scalar_type() != reduced)) {
    item = {};
    item = make(bucket, reduced);
  }
  return item.tensor();
}

void ReducedShards::zero(int64_t bucket, layout::Range slot) {
  zero_part(at(bucket), range(bucket), slot);
}

void ReducedShards::take(
    int64_t bucket,
    layout::Range slot,
    const at::Tensor& source,
    int64_t source_begin) {
  take_part(at(bucket), range(bucket), slot, source, source_begin);
}

at::Tensor RoundedBuckets::round(int64_t bucket, const at::Tensor& whole) {
  const auto reduced = context_.reduced_dtype(bucket);
  if (!has_16_bits(c10::scalarTypeToTypeMeta(reduced)) || has_16_bits(whole.dtype())) {
    return whole;
  }
  memory::Slab& slab = at_bucket(slabs_, bucket);
  slab = pool_->take(whole.numel(), whole.options().dtype(reduced));
  memory::convert_elements(slab.tensor, 0, whole, 0, whole.numel());
  return slab.tensor;
}

at::Tensor RoundedBuckets::get(int64_t bucket) const {
  return has_bucket(slabs_, bucket) ? slabs_[bucket].tensor : at::Tensor();
}

void RoundedBuckets::finish(int64_t bucket) {
  if (get(bucket).defined()) {
    pool_->give(std::move(slabs_[bucket]));
    slabs_[bucket] = {};
  }
}

} // namespace zero::sharding
