#include <zero/sharding/gradient_storage.h>

#include <limits>
#include <utility>

namespace zero::sharding {
namespace {

using memory::FlatBuffer;
using memory::Purpose;

// Grows a vector of one item a bucket as the table grows.
template <typename T>
T& at_bucket(std::vector<T>& items, int64_t bucket) {
  if (static_cast<int64_t>(items.size()) <= bucket) {
    items.resize(bucket + 1);
  }
  return items[bucket];
}

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

class WholeGradients : public GradientStorage {
 public:
  explicit WholeGradients(const GradientContext& context) : context_(context) {}

  const at::Tensor& open(int64_t bucket) override {
    FlatBuffer& whole = at_bucket(whole_, bucket);
    if (!whole) {
      const BucketEntry& entry = context_.table.bucket(bucket);
      whole = FlatBuffer(entry.layout.numel, entry.options, Purpose::gradients, context_.account);
    }
    return whole.tensor();
  }

  bool is_open(int64_t bucket) const override {
    return bucket < static_cast<int64_t>(whole_.size()) && whole_[bucket];
  }

  at::Tensor reduced(int64_t bucket) override {
    open(bucket);
    const layout::Range range = reduced_range(bucket);
    return whole_[bucket].view(range.begin, range.size());
  }

  layout::Range reduced_range(int64_t bucket) const override {
    return context_.table.shard(bucket);
  }

  void keep(int64_t bucket, layout::Range slot) override {
    const layout::Range shard = context_.table.shard(bucket);
    const layout::Range own = layout::intersect(slot, shard);
    FlatBuffer& kept = at_bucket(kept_, bucket);
    if (!kept) {
      const BucketEntry& entry = context_.table.bucket(bucket);
      kept = FlatBuffer(shard.size(), entry.options, Purpose::gradients, context_.account);
    }
    memory::copy_elements(
        kept.tensor(), own.begin - shard.begin, open(bucket), own.begin, own.size());
  }

  void drop(int64_t bucket, layout::Range slot) override {
    const layout::Range shard = context_.table.shard(bucket);
    const layout::Range own = layout::intersect(slot, shard);
    if (at_bucket(kept_, bucket)) {
      memory::zero_elements(kept_[bucket].tensor(), own.begin - shard.begin, own.size());
    }
  }

  comm::WorkPtr reduce(int64_t bucket, bool add, comm::Tag tag) override {
    const layout::Range shard = context_.table.shard(bucket);
    comm::Reduction reduction{context_.divisor, {}};
    if (add) {
      reduction.addend = at_bucket(kept_, bucket).tensor();
    }
    return start(
        whole_[bucket].view(shard.begin, shard.size()),
        whole_[bucket].tensor(),
        std::move(reduction),
        std::move(tag));
  }

  void finish(int64_t bucket) override {
    at_bucket(kept_, bucket) = {};
  }

  int64_t max_in_flight() const override {
    return std::numeric_limits<int64_t>::max();
  }

  void end_backward() override {}

  void close_all() override {
    kept_.clear();
  }

  void clear() override {
    kept_.clear();
    whole_.clear();
  }

 protected:
  virtual comm::WorkPtr
  start(at::Tensor own, at::Tensor whole, comm::Reduction reduction, comm::Tag tag) {
    return context_.communicator->reduce_scatter(
        std::move(own), std::move(whole), std::move(reduction), std::move(tag));
  }

  GradientContext context_;

 private:
  std::vector<FlatBuffer> whole_;
  std::vector<FlatBuffer> kept_;
};

class ReplicatedGradients final : public WholeGradients {
 public:
  using WholeGradients::WholeGradients;

  layout::Range reduced_range(int64_t bucket) const override {
    return {0, context_.table.bucket(bucket).layout.numel};
  }

 protected:
  comm::WorkPtr
  start(at::Tensor /*own*/, at::Tensor whole, comm::Reduction reduction, comm::Tag tag) override {
    return context_.communicator->all_reduce(
        std::move(whole), std::move(reduction), std::move(tag));
  }
};

class ShardedGradients final : public GradientStorage {
 public:
  ShardedGradients(const GradientContext& context, std::shared_ptr<memory::SlabPool> pool)
      : context_(context),
        keeps_pool_(pool != nullptr),
        pool_(keeps_pool_ ? std::move(pool) : std::make_shared<memory::SlabPool>(context.account)) {
  }

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
    return bucket < static_cast<int64_t>(open_.size()) && open_[bucket];
  }

  at::Tensor reduced(int64_t bucket) override {
    return shard(bucket).tensor();
  }

  layout::Range reduced_range(int64_t bucket) const override {
    return context_.table.shard(bucket);
  }

  void keep(int64_t /*bucket*/, layout::Range /*slot*/) override {}

  void drop(int64_t bucket, layout::Range slot) override {
    const layout::Range range = context_.table.shard(bucket);
    const layout::Range own = layout::intersect(slot, range);
    memory::zero_elements(shard(bucket).tensor(), own.begin - range.begin, own.size());
  }

  comm::WorkPtr reduce(int64_t bucket, bool add, comm::Tag tag) override {
    const at::Tensor target = shard(bucket).tensor();
    return context_.communicator->reduce_scatter(
        target,
        open_[bucket].tensor,
        {context_.divisor, add ? target : at::Tensor()},
        std::move(tag));
  }

  void finish(int64_t bucket) override {
    pool_->give(std::move(open_[bucket]));
    open_[bucket] = {};
  }

  int64_t max_in_flight() const override {
    return 2;
  }

  void end_backward() override {
    if (!keeps_pool_) {
      pool_->clear();
    }
  }

  void close_all() override {
    open_.clear();
    end_backward();
  }

  void clear() override {
    close_all();
    shards_.clear();
  }

 private:
  FlatBuffer& shard(int64_t bucket) {
    FlatBuffer& shard = at_bucket(shards_, bucket);
    if (!shard) {
      const BucketEntry& entry = context_.table.bucket(bucket);
      shard =
          FlatBuffer(entry.layout.shard_numel, entry.options, Purpose::gradients, context_.account);
    }
    return shard;
  }

  GradientContext context_;
  const bool keeps_pool_;
  std::shared_ptr<memory::SlabPool> pool_;
  std::vector<memory::Slab> open_;
  std::vector<FlatBuffer> shards_;
};

} // namespace

std::unique_ptr<GradientStorage> make_replicated_gradients(const GradientContext& context) {
  return std::make_unique<ReplicatedGradients>(context);
}

std::unique_ptr<GradientStorage> make_whole_gradients(const GradientContext& context) {
  return std::make_unique<WholeGradients>(context);
}

std::unique_ptr<GradientStorage> make_sharded_gradients(
    const GradientContext& context,
    std::shared_ptr<memory::SlabPool> pool) {
  return std::make_unique<ShardedGradients>(context, std::move(pool));
}

} // namespace zero::sharding
