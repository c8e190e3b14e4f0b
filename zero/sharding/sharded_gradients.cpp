// Stages 2 and 3: a bucket's whole gradient is open only while it is being filled and
// reduced.

#include <zero/sharding/gradient_storage.h>

#include <utility>

#include <zero/memory/elements.h>
#include <zero/sharding/reduced_shards.h>

namespace zero::sharding {
namespace {

void zero_between_slots(const at::Tensor& whole, const ParameterTable& table, int64_t bucket) {
  const layout::Bucket& layout = table.bucket(bucket).layout;
  int64_t end = 0;
  for (const int64_t index : layout.parameters) {
    const layout::Range slot = table.entry(index).slot.range();
    memory::zero_elements(whole, end, slot.begin - end);
    end = slot.end;
  }
  memory::zero_elements(whole, end, layout.numel - end);
}

class ShardedGradients final : public GradientStorage {
 public:
  ShardedGradients(const GradientContext& context, std::shared_ptr<memory::SlabPool> pool)
      : context_(context),
        keeps_pool_(pool != nullptr),
        pool_(keeps_pool_ ? std::move(pool) : make_pool(context)),
        rounded_(context_, pool_),
        shards_(context_, false) {}

  const at::Tensor& open(int64_t bucket) override {
    memory::Slab& opened = at_bucket(open_, bucket);
    if (!opened) {
      const BucketEntry& entry = context_.table.bucket(bucket);
      opened = pool_->take(entry.layout.numel, entry.options);
      zero_between_slots(opened.tensor, context_.table, bucket);
    }
    return opened.tensor;
  }

  bool is_open(int64_t bucket) const override {
    return has_bucket(open_, bucket);
  }

  at::Tensor reduced(int64_t bucket) override {
    return shards_.at(bucket);
  }

  layout::Range reduced_range(int64_t bucket) const override {
    return context_.table.shard(bucket);
  }

  void keep(int64_t /*bucket*/, layout::Range /*slot*/) override {}

  void drop(int64_t bucket, layout::Range slot) override {
    shards_.zero(bucket, slot);
  }

  comm::WorkPtr reduce(int64_t bucket, bool add, const at::Tensor& sums, const comm::Tag& tag)
      override {
    const at::Tensor& target = shards_.target(bucket, add);
    return context_.reducer->reduce_scatter(
        bucket,
        target,
        sums.defined() ? sums : rounded_.round(bucket, open_[bucket].tensor),
        add ? target : at::Tensor(),
        tag);
  }

  void finish(int64_t bucket) override {
    rounded_.finish(bucket);
    pool_->give(std::move(open_[bucket]));
    open_[bucket] = {};
  }

  void forget(int64_t bucket) override {
    shards_.drop(bucket);
  }

  int64_t max_in_flight() const override {
    return 2;
  }

  // The next backward fills one bucket in memory that is there, which spares the system
  // to make pages of zeros.
  void end_backward() override {
    if (!keeps_pool_) {
      pool_->keep_one();
    }
  }

  void close_all() override {
    open_.clear();
    rounded_.clear();
    end_backward();
  }

  void clear() override {
    close_all();
    if (!keeps_pool_) {
      pool_->clear();
    }
    shards_.clear();
  }

 private:
  const GradientContext context_;
  const bool keeps_pool_;
  const std::shared_ptr<memory::SlabPool> pool_;
  RoundedBuckets rounded_;
  ReducedShards shards_;
  std::vector<memory::Slab> open_;
};

} // namespace

std::unique_ptr<GradientStorage> make_sharded_gradients(
    const GradientContext& context,
    std::shared_ptr<memory::SlabPool> pool) {
  return std::make_unique<ShardedGradients>(context, std::move(pool));
}

} // namespace zero::sharding
