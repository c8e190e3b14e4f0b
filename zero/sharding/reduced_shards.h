#pragma once

// Reduced gradients in memory of their own, and what a reduction sends in their
// stead: the pieces that the stages' gradient storages are made of.

#include <cstdint>
#include <vector>

#include <zero/sharding/by_bucket.h>
#include <zero/sharding/gradient_storage.h>

namespace zero::sharding {

// Of what a rank holds of a bucket, the elements `held`: sets those of a slot to zero,
// or takes them from `source`, where the slot starts at `source_begin`.
void zero_part(const at::Tensor& part, layout::Range held, layout::Range slot);
void take_part(
    const at::Tensor& part,
    layout::Range held,
    layout::Range slot,
    const at::Tensor& source,
    int64_t source_begin);

// One buffer a bucket over the elements that this rank holds reduced: of the reduced
// dtype, or of fp32 as an accumulator of 16-bit gradients.
class ReducedShards {
 public:
  // `whole`: over the whole bucket (stage 0), else over this rank's shard.
  ReducedShards(const GradientContext& context, bool whole) : context_(context), whole_(whole) {}

  bool has(int64_t bucket) const {
    return has_bucket(items_, bucket);
  }
  layout::Range range(int64_t bucket) const;
  // Made, with zeros, where there is none.
  const at::Tensor& at(int64_t bucket);
  // Where the next reduction goes: what is there is kept, in fp32 if it has 16 bits,
  // when it is to be added to.
  const at::Tensor& target(int64_t bucket, bool add);
  void zero(int64_t bucket, layout::Range slot);
  // Takes elements of a slot that lie at `from` in `source`.
  void take(int64_t bucket, layout::Range slot, const at::Tensor& source, int64_t source_begin);
  void drop(int64_t bucket) {
    at_bucket(items_, bucket) = {};
  }
  void clear() {
    items_.clear();
  }

 private:
  memory::FlatBuffer make(int64_t bucket, c10::ScalarType dtype) const;

  const GradientContext& context_;
  const bool whole_;
  std::vector<memory::FlatBuffer> items_;
};

// Whole buckets of fp32 gradients rounded to 16 bits, while they are being reduced.
class RoundedBuckets {
 public:
  RoundedBuckets(const GradientContext& context, std::shared_ptr<memory::SlabPool> pool)
      : context_(context), pool_(std::move(pool)) {}

  // What to send: `whole` itself, or rounded where the reduced dtype has fewer bits.
  at::Tensor round(int64_t bucket, const at::Tensor& whole);
  // The rounded bucket, undefined where there is none.
  at::Tensor get(int64_t bucket) const;
  void finish(int64_t bucket);
  void clear() {
    slabs_.clear();
  }

 private:
  const GradientContext& context_;
  const std::shared_ptr<memory::SlabPool> pool_;
  std::vector<memory::Slab> slabs_;
};

} // namespace zero::sharding
