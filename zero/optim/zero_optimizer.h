#pragma once

// The C++ face.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/api.h>
#include <zero/comm/groups.h>
#include <zero/comm/init.h>
#include <zero/optim/engine.h>
#include <zero/options.h>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace zero {

// Parameters that share one rule.
struct ParameterGroup {
  std::vector<at::Tensor> parameters;
  Rule rule = AdamW{};
};

// Makes a torch::optim optimizer over this rank's shards of the parameters (one-
// dimensional tensors); see zero::elementwise in <zero/optim/elementwise.h>.
using ShardOptimizerFactory =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> shards)>;

class Join;
class Sharder;

// Shards the training of a torch::nn::Module in place and steps it. The module
// is used as before; all ranks must construct, step, clip and read in the same
// order. Parameters are taken in the order of Module::named_parameters(), tied
// ones once.
class ZERO_API ZeroOptimizer {
 public:
  // [collective] `ranks`: a process group (null: that of zero::init(), or one rank
  // without a launcher), or zero::Groups{.shard = ..., .replicate = ...}. Throws c10::ValueError,
  // TypeError or NotImplementedError, naming the option or parameter, before any communication.
  ZeroOptimizer(
      torch::nn::Module& module,
      const Options& options,
      const Rule& rule = AdamW{},
      const Ranks& ranks = {});
  // Every trainable parameter of the module must be in exactly one group.
  ZeroOptimizer(
      torch::nn::Module& module,
      const Options& options,
      const std::vector<ParameterGroup>& groups,
      const Ranks& ranks = {});
  ZeroOptimizer(
      torch::nn::Module& module,
      const Options& options,
      const ShardOptimizerFactory& factory,
      const Ranks& ranks = {});
  // Of a module that was sharded piece by piece (<zero/optim/sharder.h>).
  ZeroOptimizer(torch::nn::Module& module, Sharder sharder, const Rule& rule = AdamW{});
  ~ZeroOptimizer();
  ZeroOptimizer(ZeroOptimizer&&) noexcept;
  ZeroOptimizer& operator=(ZeroOptimizer&&) noexcept;

  // [collective] False: left out on all ranks, because a gradient is not finite and
  // on_nonfinite is "skip". With step_in_backward it ends the step that backward took.
  bool step();
  void zero_grad(bool set_to_none = true);
  // [collective] Scales the gradient to at most `max_norm`; returns its norm
  // before that. The same number on every rank. With `error_if_nonfinite` throws on
  // all ranks, before scaling, when the norm is not finite, and names the first
  // parameter with such a gradient.
  GradNorm
  clip_grad_norm_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);
  // [collective] Clamps each element of the gradient to [-clip_value, clip_value].
  void clip_grad_value_(double clip_value);
  // [collective] Divides the gradient by `divisor`, the same on every rank, or, with
  // `across_ranks`, by the sum of what the ranks give (with Options::average false and
  // summed losses: by all ranks' tokens). Returns what it was divided by; throws
  // c10::ValueError on all ranks unless that is finite and positive. Once a step,
  // before clipping.
  double divide_grad_(double divisor, bool across_ranks = false);
  GradNorm grad_norm(double norm_type = 2.0); // [collective]
  // [collective] Of each parameter group by itself, in one exchange.
  std::vector<GradNorm> grad_norms(double norm_type = 2.0);
  // [collective] Waits for every transfer in flight.
  void synchronize();

  // [collective] Runs `body` with whole parameters (stage 3; below it they are
  // whole). With `writeback` it may write to them, and rank 0's values go to all
  // ranks at the end; without, writes raise.
  void gathered(const std::function<void()>& body, bool writeback = false);
  // [collective] Gives the module its parameters back, whole and in memory of
  // their own. Without it, those of stage 3 have no data once the optimizer is
  // gone, and say so. Nothing else may be called afterwards.
  void release();

  // Backward accumulates without traffic while the guard lives; it costs the
  // whole gradient in memory.
  class ZERO_API NoSync {
   public:
    explicit NoSync(std::shared_ptr<Engine> engine);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<Engine> engine_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync();

  // [collective] Replaces the reduction of gradient buckets: zero::compress_bf16(),
  // zero::compress_fp16(), one of your own (<zero/sharding/comm_hook.h>), or null for
  // none. Not inside backward. Throws c10::ValueError on all ranks when they give hooks
  // of different names.
  void register_comm_hook(std::shared_ptr<CommHook> hook);

  // Rules are read at each step (with step_in_backward: when backward begins): change
  // them for schedules. By group; not with a factory.
  Rule& rule(size_t group = 0);
  size_t group_count() const;
  // The learning rate of every group, or of the factory's optimizer.
  void set_lr(double lr);

  Engine& engine();
  // Of one with a factory, for checkpoints: its torch::optim optimizer (null with rules)
  // and what that steps, this rank's part of each parameter, by index.
  torch::optim::Optimizer* inner();
  const std::vector<at::Tensor>& shards();

 private:
  friend class Join;
  bool step_shards();
  void lend_rules();
  // A step that other ranks take, with their hyper-parameters.
  void follow_step(const std::string& hyperparameters);

  std::shared_ptr<Engine> engine_;
  // Shared with the engine, which reads them with step_in_backward.
  std::shared_ptr<std::vector<Rule>> rules_ = std::make_shared<std::vector<Rule>>();
  std::unique_ptr<torch::optim::Optimizer> inner_; // instead of rules
  std::vector<at::Tensor> shards_; // its parameters, by index
};

// [collective at stages 1 to 3] Whole tensors of a managed parameter, for
// inspection. full_grad: undefined where there is no gradient.
ZERO_API at::Tensor full_param(ZeroOptimizer& optimizer, const at::Tensor& parameter);
ZERO_API at::Tensor full_grad(ZeroOptimizer& optimizer, const at::Tensor& parameter);
ZERO_API std::map<std::string, at::Tensor> full_state(
    ZeroOptimizer& optimizer,
    const at::Tensor& parameter);

// What this rank holds and has sent, next to theory, as a table.
ZERO_API std::string report(ZeroOptimizer& optimizer);

} // namespace zero
