#pragma once

// What a user may set: plain aggregates for designated initializers. The Python
// face mirrors them field by field (ZeroConfig; a test compares the two), and
// every check of a value is in validate(), before anything communicates.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <zero/api.h>

namespace zero {

struct Options {
  // ZeRO stage: 0 replicates, 1 shards optimizer state, 2 gradients too,
  // 3 parameters too.
  int64_t stage = 1;
  // Gradients are reduced in buckets of about this many bytes ...
  int64_t bucket_bytes = 25 * 1024 * 1024;
  // ... but the first, which backward fills first, is small to start early.
  int64_t first_bucket_bytes = 1024 * 1024;
  // Stage 3: units gathered ahead of their use.
  int64_t prefetch = 1;
  // Stage 3: "true", "false" or "auto".
  std::string reshard_after_forward = "true";
  // Stage 3: names of the modules that are gathered together.
  std::vector<std::string> units = {};
  // Stage 3: units smaller than this many elements are merged with a neighbour; a
  // gather of a few bytes costs as much as one of many.
  int64_t min_unit_numel = 8192;
  // Stage 3: most elements gathered at once; unlimited when unset.
  std::optional<int64_t> max_live_numel = {};
  // Mixed precision: "float32", "bfloat16" or "float16". What parameters become when
  // they are wrapped; of 16 bits, fp32 masters of this rank's shard are what is stepped.
  std::optional<std::string> param_dtype = {};
  // What each reduction of gradients is rounded to; by default the parameters' dtype,
  // and float32 with param_dtype float16, whose range a loss scale needs. Gradients of
  // fp32 are sent in 16 bits too, then. Sums over several backwards are of fp32 in any
  // case.
  std::optional<std::string> reduce_dtype = {};
  // "float32", and set: parameters of 16 bits have masters without param_dtype too.
  std::optional<std::string> master_dtype = {};
  // Python: the model's floating-point outputs and inputs are cast, the latter to
  // param_dtype.
  std::optional<std::string> output_dtype = {};
  bool cast_forward_inputs = false;
  // True: the mean of the ranks' gradients; false: their sum.
  bool average = true;
  // "host": ranks of one host read each other's memory; "group": point to point over
  // Gloo; "auto": the first where all ranks are on one host, else the second. Tensors on
  // CUDA devices travel by NCCL with "auto" and several ranks, and with "nccl"; with
  // "host" and "group" through the host's memory.
  std::string transport = "auto";
  // Seconds that a rank waits for its peers before it raises an error.
  double timeout = 600.0;
  // A step that sees an inf or NaN in a gradient on any rank: "skip" leaves it out,
  // "raise" throws, on all ranks, and nothing is changed; "ignore" does not look.
  std::string on_nonfinite = "ignore";
  // Rank 0's values of buffers go to all ranks in each step, and in Python before each
  // training forward too. Without it they do so once, at construction.
  bool sync_buffers = false;
  // Names of parameters that are neither reduced nor stepped.
  std::vector<std::string> ignored_params = {};
  // Each bucket is stepped, and its gradient freed, as soon as it is reduced; step() ends
  // the step. Native rules, one backward a step; nothing that needs all gradients.
  bool step_in_backward = false;
  // Of parameters on a device: "optimizer" keeps masters and state in the host's memory,
  // where the CPU steps them; "parameters", at stage 3, the shards of parameters too.
  std::optional<std::string> offload = {};
  // CUDA: buffers that NCCL reads and writes come from its own allocator (ncclMemAlloc),
  // where torch and the GPUs' drivers have it.
  bool registered_buffers = false;
  // Hybrid sharding: what the groups of zero::Groups are called, for errors.
  std::optional<std::string> shard_group = {};
  std::optional<std::string> replicate_group = {};

  // Throws c10::ValueError naming the option, the value and what is allowed.
  ZERO_API void validate() const;
};

// Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight
// Decay Regularization", algorithm 2). Defaults are torch.optim.AdamW's.
struct AdamW {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  // Divides by the largest second moment so far (Reddi et al., "On the Convergence of
  // Adam and Beyond"), which is one more state tensor; to be set before the first step.
  bool amsgrad = false;
  bool maximize = false; // steps along the gradient instead of against it
};

// Adam (Kingma and Ba, "Adam: A Method for Stochastic Optimization", algorithm
// 1), weight decay added to the gradient. Defaults are torch.optim.Adam's.
struct Adam {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool amsgrad = false; // as of AdamW
  bool maximize = false;
};

// Stochastic gradient descent with momentum, in torch.optim.SGD's form.
struct SGD {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool maximize = false;
};

// Sign of an interpolated moment (Chen et al., "Symbolic Discovery of Optimization
// Algorithms", algorithm 2): p -= lr * (sign(b0 * m + (1 - b0) * g) + weight_decay * p)
// with the weights before the step, then m = b1 * m + (1 - b1) * g. One state tensor.
struct Lion {
  double lr = 1e-4;
  std::array<double, 2> betas = {0.9, 0.99};
  double weight_decay = 0.0;
  bool maximize = false;
};

// The rule that steps a parameter group natively, in one pass over flat shards.
using Rule = std::variant<AdamW, Adam, SGD, Lion>;

// Throws c10::ValueError naming the hyper-parameter and its allowed range.
ZERO_API void validate(const Rule& rule);

} // namespace zero
