#pragma once

// Comm hooks: what replaces the reduction of a gradient bucket. A hook is called on
// the thread of backward (of step() for what no_sync() left), for one bucket after the
// other in the order that all ranks share, so it may call collectives of a group of
// its own. It must not call the optimizer. Register one with
// ZeroOptimizer::register_comm_hook.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/api.h>
#include <zero/comm/communicator.h>
#include <zero/layout/flat_layout.h>

namespace zero {

// A bucket of gradients that is about to be reduced, as this rank has it.
struct ZERO_API GradientBucket {
  int64_t index = 0;
  std::string what; // for errors: "bucket 2 (blocks.3.up.weight ...)"
  std::vector<std::string> names; // of its parameters
  // This rank's whole gradient: one-dimensional, contiguous, zeros in the padding; may
  // be overwritten.
  at::Tensor gradients;
  int64_t rank = 0;
  int64_t world_size = 1;
  layout::Range shard_range; // of this rank
  // Memory for as many elements as `gradients`, of any value and another dtype, counted
  // as buffers; the hook's until the work that reduce() returned was waited for. Once
  // for each reduction.
  std::function<at::Tensor(c10::ScalarType dtype)> scratch;

  // The part of `gradients` whose sum over all ranks this rank is to have.
  at::Tensor shard() const;
};

class ZERO_API CommHook {
 public:
  virtual ~CommHook() = default;
  // Compared between ranks when it is registered.
  virtual std::string name() const = 0;
  // Starts: output = reduction.addend + the reduced gradient of this rank's shard.
  // `output`: one-dimensional, of the bucket's dtype or of fp32, possibly over
  // bucket.shard(). `reduction`: as Communicator::reduce_scatter takes it. What
  // it throws comes out of backward. `communicator` is the library's own: all ranks
  // must call the same on it.
  virtual comm::WorkPtr reduce(
      const GradientBucket& bucket,
      comm::Communicator& communicator,
      at::Tensor output,
      comm::Reduction reduction,
      comm::Tag tag) = 0;
  // Whether reduce() returns an operation of `communicator`: others of that come after
  // it and need not wait.
  virtual bool in_order() const {
    return false;
  }
  // What it sends of gradients of this dtype, for the theory in report().
  virtual c10::ScalarType wire_dtype(c10::ScalarType dtype) const {
    return dtype;
  }
};

// Gradients of fp32 are rounded to 16 bits, sent, summed in fp32 in rank order and kept
// in fp32: half of the reduce-scatter's bytes. Those of other dtypes travel as they are.
// bf16 has the range of fp32; the sum is divided by the number of ranks.
ZERO_API std::shared_ptr<CommHook> compress_bf16();
// Divided by the number of ranks before they are rounded: what is larger than 65504
// after that becomes inf (see Options::on_nonfinite), what is smaller than 6e-8 zero.
ZERO_API std::shared_ptr<CommHook> compress_fp16();

// A hook from a function that returns the finished gradient, divided if it is to be a
// mean: of the whole bucket, or of bucket.shard(), one-dimensional, of the bucket's
// dtype or of fp32. Else backward throws c10::ValueError or c10::TypeError.
using CommHookFunction = std::function<at::Tensor(const GradientBucket& bucket)>;
ZERO_API std::shared_ptr<CommHook> make_comm_hook(std::string name, CommHookFunction function);

// For hooks: checks such a gradient and writes output = addend + its shard.
ZERO_API void take_finished(
    const GradientBucket& bucket,
    const at::Tensor& finished,
    const at::Tensor& output,
    const at::Tensor& addend);

} // namespace zero
