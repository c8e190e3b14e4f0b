#pragma once

// The C++ face.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/api.h>
#include <zero/comm/init.h>
#include <zero/optim/engine.h>
#include <zero/options.h>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace zero {

// Parameters that share one rule. Names as torch::nn::Module gives them; empty:
// every parameter.
struct ParameterGroup {
  std::vector<at::Tensor> parameters;
  Rule rule = AdamW{};
};

// Shards the training of a torch::nn::Module in place and steps it. The module
// is used as before; all ranks must construct, step, clip and read in the same
// order.
class ZERO_API ZeroOptimizer {
 public:
  // [collective] `group` null: the group that zero::init() made, or one rank.
  ZeroOptimizer(
      torch::nn::Module& module,
      const Options& options,
      const Rule& rule = AdamW{},
      c10::intrusive_ptr<c10d::ProcessGroup> group = nullptr);
  ZeroOptimizer(
      torch::nn::Module& module,
      const Options& options,
      std::vector<ParameterGroup> groups,
      c10::intrusive_ptr<c10d::ProcessGroup> group = nullptr);
  ~ZeroOptimizer();

  void step(); // [collective]
  void zero_grad(bool set_to_none = true);
  // [collective] The norm of the whole gradient before clipping.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);
  double grad_norm(double norm_type = 2.0); // [collective]

  // Backward accumulates without traffic while the returned guard lives.
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

  // Rules are read at each step: change them for schedules. By group.
  Rule& rule(size_t group = 0);
  size_t group_count() const;
  // Sets the learning rate of every group.
  void set_lr(double lr);

  Engine& engine();

 private:
  std::shared_ptr<Engine> engine_;
  std::vector<Rule> rules_;
};

// [collective at stages 1 and 2] Whole tensors of a managed parameter.
ZERO_API at::Tensor full_param(ZeroOptimizer& optimizer, const at::Tensor& parameter);
ZERO_API at::Tensor full_grad(ZeroOptimizer& optimizer, const at::Tensor& parameter);
ZERO_API std::map<std::string, at::Tensor>
full_state(ZeroOptimizer& optimizer, const at::Tensor& parameter);

// What this rank holds and has sent, next to theory, as a table.
ZERO_API std::string report(ZeroOptimizer& optimizer);

} // namespace zero
