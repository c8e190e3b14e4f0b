#pragma once

// BucketReducer: how a bucket's gradient is reduced, by the communicator or by a comm
// hook in its place. The gradient storages call it, under GradientManager's lock.

#include <memory>
#include <vector>

#include <zero/memory/slab_pool.h>
#include <zero/sharding/comm_hook.h>
#include <zero/sharding/parameter_table.h>

namespace zero::sharding {

class BucketReducer {
 public:
  // Sums over ranks are divided by `divisor`, which a join changes.
  BucketReducer(
      ParameterTable& table,
      std::shared_ptr<comm::Communicator> communicator,
      const std::shared_ptr<memory::Account>& account,
      double divisor);

  void set_divisor(double divisor) {
    divisor_ = divisor;
  }
  double divisor() const {
    return divisor_;
  }
  // Null: none.
  void set_hook(std::shared_ptr<CommHook> hook) {
    hook_ = std::move(hook);
  }
  const std::shared_ptr<CommHook>& hook() const {
    return hook_;
  }

  // Starts output = addend + the reduced gradient of this rank's shard, from the whole
  // `input`, which a hook may overwrite; `addend` may be undefined.
  comm::WorkPtr reduce_scatter(
      int64_t bucket,
      const at::Tensor& output,
      const at::Tensor& input,
      const at::Tensor& addend,
      const comm::Tag& tag);
  // The same, with the output in this rank's slice of `whole` and then gathered there
  // from all ranks. `input` may be `whole`.
  comm::WorkPtr all_reduce(
      int64_t bucket,
      const at::Tensor& whole,
      const at::Tensor& input,
      const at::Tensor& addend,
      const comm::Tag& tag);
  // Where the reduction that was started last puts this rank's part.
  const at::Tensor& output(int64_t bucket) const {
    return outputs_[bucket];
  }
  // Once the bucket's work was waited for.
  void finish(int64_t bucket);
  void end_backward();

 private:
  GradientBucket describe(int64_t bucket, const at::Tensor& input);

  ParameterTable& table_;
  const std::shared_ptr<comm::Communicator> communicator_;
  double divisor_;
  std::shared_ptr<CommHook> hook_;
  memory::SlabPool pool_;
  std::vector<memory::Slab> scratch_; // by bucket
  std::vector<at::Tensor> outputs_; // by bucket
};

} // namespace zero::sharding
