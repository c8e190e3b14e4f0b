#pragma once

// Where gradients are held while backward fills them and after they are reduced.
// Stages 0 and 1 hold the whole gradient for good; stage 2 holds a bucket's whole
// gradient only while it is being filled and reduced, and this rank's shard for
// good. Managed by GradientManager, under its lock.

#include <memory>
#include <optional>
#include <vector>

#include <zero/comm/communicator.h>
#include <zero/memory/slab_pool.h>
#include <zero/sharding/bucket_reducer.h>
#include <zero/sharding/parameter_table.h>

namespace zero::sharding {

class GradientStorage {
 public:
  virtual ~GradientStorage() = default;

  // The bucket's whole gradient, to accumulate in. When it was not open, zero between
  // the slots of parameters, and anything in them.
  virtual const at::Tensor& open(int64_t bucket) = 0;
  virtual bool is_open(int64_t bucket) const = 0;

  // The reduced gradient that this rank holds, over reduced_range(bucket): of
  // reduce_dtype (by default the parameters'), and of fp32 where 16-bit gradients of
  // several backwards are added up.
  virtual at::Tensor reduced(int64_t bucket) = 0;
  virtual layout::Range reduced_range(int64_t bucket) const = 0;
  // The same where the step runs, which may be a copy: the host waits for that.
  virtual at::Tensor stepped_by(int64_t bucket) {
    return reduced(bucket);
  }
  // These are going to be asked for, in this order.
  virtual void prepare(const std::vector<int64_t>& /*buckets*/) {}
  // Somebody may write to what reduced() gave until the next reduction.
  virtual void lent(int64_t /*bucket*/) {}
  // Stage 0, where `.grad` shows a reduced gradient of another dtype, rounded: after
  // reduced() was written to, and before it is read, since the user may have written
  // to `.grad`.
  virtual void show(int64_t /*bucket*/) {}
  virtual void take_shown(int64_t /*bucket*/) {}
  // Elements of a slot, whole and dense in its memory order, as the reduced ones.
  virtual void assign(int64_t bucket, layout::Range slot, const at::Tensor& values);
  virtual void zero(int64_t bucket, layout::Range slot);

  // Before a slot is used again: puts its reduced elements aside, for the next
  // reduction to add to.
  virtual void keep(int64_t bucket, layout::Range slot) = 0;
  // Forgets what was put aside.
  virtual void drop(int64_t bucket, layout::Range slot) = 0;

  // Starts the reduction of the open bucket, or of `sums` in its place, added to what
  // was put aside when `add`; finish() is called once it is done.
  virtual comm::WorkPtr
  reduce(int64_t bucket, bool add, const at::Tensor& sums, const comm::Tag& tag) = 0;
  virtual void finish(int64_t bucket) = 0;
  // Lets go of the bucket's gradient, which is not open otherwise and was stepped.
  virtual void forget(int64_t bucket) = 0;

  // Reductions that may be in flight before the next bucket opens.
  virtual int64_t max_in_flight() const = 0;
  virtual void end_backward() = 0;
  // Lets go of open buckets that were not reduced.
  virtual void close_all() = 0;
  // Lets go of everything.
  virtual void clear() = 0;
};

struct GradientContext {
  ParameterTable& table;
  std::shared_ptr<comm::Communicator> communicator;
  std::shared_ptr<memory::Account> account;
  std::shared_ptr<BucketReducer> reducer = {};
  std::optional<c10::ScalarType> reduce_dtype = {};

  // What a bucket's gradients are rounded to when they are reduced.
  c10::ScalarType reduced_dtype(int64_t bucket) const;
};

// Of whole buckets that come and go.
std::shared_ptr<memory::SlabPool> make_pool(const GradientContext& context);

// What a stage holds, and where Options::offload has the CPU step.
std::unique_ptr<GradientStorage> make_gradient_storage(
    const Options& options,
    const GradientContext& context,
    const std::shared_ptr<memory::SlabPool>& pool);
// Stage 0: every rank ends with the whole reduced gradient.
std::unique_ptr<GradientStorage> make_replicated_gradients(const GradientContext& context);
// Stage 1: the whole gradient is held, this rank's shard of it is reduced.
std::unique_ptr<GradientStorage> make_whole_gradients(const GradientContext& context);
// Stage 2; stage 3, with a pool of slabs that it shares with unsharded units and
// that keeps its memory between backwards.
std::unique_ptr<GradientStorage> make_sharded_gradients(
    const GradientContext& context,
    std::shared_ptr<memory::SlabPool> pool = nullptr);

} // namespace zero::sharding
