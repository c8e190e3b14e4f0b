#include <zero/sharding/gradient_storage.h>

#include <limits>
#include <utility>

#include <zero/memory/elements.h>
#include <zero/sharding/host_gradients.h>
#include <zero/sharding/reduced_shards.h>

namespace zero::sharding {

void GradientStorage::assign(int64_t bucket, layout::Range slot, const at::Tensor& values) {
  take_part(reduced(bucket), reduced_range(bucket), slot, values, 0);
}

void GradientStorage::zero(int64_t bucket, layout::Range slot) {
  zero_part(reduced(bucket), reduced_range(bucket), slot);
}

namespace {

using memory::FlatBuffer;
using memory::Purpose;

// Stages 0 and 1: buckets stay open.
class HeldGradients : public GradientStorage {
 public:
  explicit HeldGradients(const GradientContext& context)
      : context_(context), rounded_(context_, make_pool(context)) {}

  const at::Tensor& open(int64_t bucket) override {
    FlatBuffer& whole = at_bucket(whole_, bucket);
    if (!whole) {
      const BucketEntry& entry = context_.table.bucket(bucket);
      whole = FlatBuffer(
          entry.layout.numel,
          entry.options,
          Purpose::gradients,
          context_.account,
          context_.communicator->buffers().get());
    }
    return whole.tensor();
  }

  bool is_open(int64_t bucket) const override {
    return has_bucket(whole_, bucket);
  }

  int64_t max_in_flight() const override {
    return std::numeric_limits<int64_t>::max();
  }

  void end_backward() override {}

  void forget(int64_t bucket) override {
    at_bucket(whole_, bucket) = {};
  }

  void clear() override {
    close_all();
    whole_.clear();
  }

 protected:
  bool narrow(int64_t bucket) const {
    return memory::has_16_bits(context_.table.bucket(bucket).options.dtype());
  }
  // The reduced gradient has another dtype.
  bool differs(int64_t bucket) const {
    return context_.reduced_dtype(bucket) !=
        context_.table.bucket(bucket).options.dtype().toScalarType();
  }

  const GradientContext context_;
  RoundedBuckets rounded_;
  // Slots of the bucket are on their way from where they were reduced in place.
  std::vector<char> moving_;

 private:
  std::vector<FlatBuffer> whole_;
};

// Stage 1. A gradient of the parameters' dtype is reduced in place; what it is added
// to lies apart, and so does one of another dtype.
class WholeGradients final : public HeldGradients {
 public:
  explicit WholeGradients(const GradientContext& context)
      : HeldGradients(context), apart_(context_, false) {}

  at::Tensor reduced(int64_t bucket) override {
    return apart_.has(bucket) || differs(bucket) ? apart_.at(bucket) : own(bucket);
  }

  layout::Range reduced_range(int64_t bucket) const override {
    return context_.table.shard(bucket);
  }

  void keep(int64_t bucket, layout::Range slot) override {
    char& moving = at_bucket(moving_, bucket);
    if (apart_.has(bucket) && moving == 0) {
      return;
    }
    moving = 1;
    apart_.target(bucket, true);
    apart_.take(bucket, slot, open(bucket), slot.begin);
  }

  void drop(int64_t bucket, layout::Range slot) override {
    if (apart_.has(bucket)) {
      apart_.zero(bucket, slot);
    }
  }

  comm::WorkPtr reduce(int64_t bucket, bool add, const at::Tensor& sums, const comm::Tag& tag)
      override {
    at_bucket(moving_, bucket) = 0;
    if (!add) {
      apart_.drop(bucket);
    }
    const bool stays = differs(bucket) || (add && narrow(bucket));
    // Before the addend is asked for, which it may widen.
    const at::Tensor target = stays ? apart_.target(bucket, add) : own(bucket);
    return context_.reducer->reduce_scatter(
        bucket,
        target,
        sums.defined() ? sums : rounded_.round(bucket, open(bucket)),
        add ? apart_.at(bucket) : at::Tensor(),
        tag);
  }

  void finish(int64_t bucket) override {
    rounded_.finish(bucket);
    if (!differs(bucket) && !narrow(bucket)) {
      apart_.drop(bucket);
    }
  }

  void forget(int64_t bucket) override {
    HeldGradients::forget(bucket);
    apart_.drop(bucket);
  }

  void close_all() override {
    rounded_.clear();
    apart_.clear();
    moving_.clear();
  }

 private:
  at::Tensor own(int64_t bucket) {
    const layout::Range shard = context_.table.shard(bucket);
    return memory::flat_view(open(bucket), shard.begin, shard.size());
  }

  ReducedShards apart_;
};

// Stage 0: `.grad` is the bucket's memory. What 16-bit gradients are added up to, or
// reduced to in fp32, lies apart, and `.grad` shows it rounded.
class ReplicatedGradients final : public HeldGradients {
 public:
  explicit ReplicatedGradients(const GradientContext& context)
      : HeldGradients(context), aside_(context_, false), sums_(context_, true) {}

  at::Tensor reduced(int64_t bucket) override {
    return narrow(bucket) && (sums_.has(bucket) || differs(bucket)) ? sums_.at(bucket)
                                                                    : open(bucket);
  }

  layout::Range reduced_range(int64_t bucket) const override {
    return {0, context_.table.bucket(bucket).layout.numel};
  }

  void show(int64_t bucket) override {
    if (narrow(bucket) && sums_.has(bucket)) {
      const at::Tensor& whole = open(bucket);
      memory::convert_elements(whole, 0, sums_.at(bucket), 0, whole.numel());
    }
  }

  void take_shown(int64_t bucket) override {
    if (narrow(bucket) && sums_.has(bucket)) {
      const at::Tensor& whole = open(bucket);
      memory::follow_elements(sums_.at(bucket), 0, whole, 0, whole.numel());
    }
  }

  void assign(int64_t bucket, layout::Range slot, const at::Tensor& values) override {
    memory::copy_elements(open(bucket), slot.begin, values, 0, slot.size());
    if (narrow(bucket) && (sums_.has(bucket) || differs(bucket))) {
      sums_.take(bucket, slot, values, 0);
    }
  }

  void zero(int64_t bucket, layout::Range slot) override {
    memory::zero_elements(open(bucket), slot.begin, slot.size());
    drop(bucket, slot);
  }

  // Of a gradient that is reduced in place the own shard is enough.
  void keep(int64_t bucket, layout::Range slot) override {
    ReducedShards& kept = narrow(bucket) || rounds(bucket) ? sums_ : aside_;
    char& moving = at_bucket(moving_, bucket);
    if (kept.has(bucket) && moving == 0) {
      return;
    }
    moving = 1;
    kept.target(bucket, true);
    kept.take(bucket, slot, open(bucket), slot.begin);
  }

  void drop(int64_t bucket, layout::Range slot) override {
    for (ReducedShards* kept : {&sums_, &aside_}) {
      if (kept->has(bucket)) {
        kept->zero(bucket, slot);
      }
    }
  }

  comm::WorkPtr reduce(int64_t bucket, bool add, const at::Tensor& sums, const comm::Tag& tag)
      override {
    at_bucket(moving_, bucket) = 0;
    BucketReducer& reducer = *context_.reducer;
    const at::Tensor& whole = open(bucket);
    if (!add) {
      sums_.drop(bucket);
    }
    if (narrow(bucket) && (add || differs(bucket))) {
      const at::Tensor& target = sums_.target(bucket, add);
      const layout::Range shard = context_.table.shard(bucket);
      const at::Tensor own = memory::flat_view(target, shard.begin, shard.size());
      return reducer.all_reduce(
          bucket, target, sums.defined() ? sums : whole, add ? own : at::Tensor(), tag);
    }
    const bool kept = add && !rounds(bucket);
    const at::Tensor sent = rounded_.round(bucket, whole);
    return reducer.all_reduce(bucket, sent, sent, kept ? aside_.at(bucket) : at::Tensor(), tag);
  }

  void finish(int64_t bucket) override {
    if (rounds(bucket)) {
      take_rounded(bucket);
    } else {
      show(bucket);
    }
    aside_.drop(bucket);
  }

  void forget(int64_t bucket) override {
    HeldGradients::forget(bucket);
    sums_.drop(bucket);
  }

  void close_all() override {
    rounded_.clear();
    aside_.clear();
    sums_.clear();
    moving_.clear();
  }

 private:
  bool rounds(int64_t bucket) const {
    return differs(bucket) && !narrow(bucket);
  }

  void take_rounded(int64_t bucket) {
    const at::Tensor& whole = open(bucket);
    const at::Tensor rounded = rounded_.get(bucket);
    memory::convert_elements(whole, 0, rounded, 0, whole.numel());
    if (sums_.has(bucket)) {
      memory::accumulate_elements(whole, 0, sums_.at(bucket), 0, whole.numel());
      sums_.drop(bucket);
    }
    rounded_.finish(bucket);
  }

  ReducedShards aside_;
  ReducedShards sums_;
};

} // namespace

std::unique_ptr<GradientStorage> make_gradient_storage(
    const Options& options,
    const GradientContext& context,
    const std::shared_ptr<memory::SlabPool>& pool) {
  std::unique_ptr<GradientStorage> storage;
  if (options.stage == 0) {
    storage = make_replicated_gradients(context);
  } else if (options.stage == 1 && !options.step_in_backward) {
    storage = make_whole_gradients(context);
  } else { // what is stepped at once need not be held whole
    storage = make_sharded_gradients(context, pool);
  }
  return options.offload
      ? std::make_unique<HostGradients>(context, std::move(storage), /*shown=*/options.stage == 0)
      : std::move(storage);
}

std::unique_ptr<GradientStorage> make_replicated_gradients(const GradientContext& context) {
  return std::make_unique<ReplicatedGradients>(context);
}

std::unique_ptr<GradientStorage> make_whole_gradients(const GradientContext& context) {
  return std::make_unique<WholeGradients>(context);
}

} // namespace zero::sharding
