#pragma once

// Which classes of torch::optim are known, and what each keeps: hyper-parameters and state
// under torch.optim's names. Internal.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::optim {
class Optimizer;
class OptimizerOptions;
class OptimizerParamState;
} // namespace torch::optim

namespace zero::checkpoint {

class ShardClass {
 public:
  virtual ~ShardClass() = default;
  virtual std::string name() const = 0;
  // Hyper-parameters of a group, as a JSON object; those that it lacks stay as they are.
  virtual std::string write(torch::optim::OptimizerOptions& options) const = 0;
  virtual void read(torch::optim::OptimizerOptions& options, const std::string& json) const = 0;
  virtual std::vector<std::string> tensor_names() const = 0;
  // Those that a state has.
  virtual std::vector<std::pair<std::string, at::Tensor>> tensors(
      torch::optim::OptimizerParamState& state) const = 0;
  // Null: it counts none.
  virtual const int64_t* steps(torch::optim::OptimizerParamState& state) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make(
      const std::map<std::string, at::Tensor>& tensors,
      int64_t steps) const = 0;
  // Of a parameter that took no step; null for those that make it then.
  virtual std::unique_ptr<torch::optim::OptimizerParamState> fresh(
      const at::Tensor& shard,
      torch::optim::OptimizerOptions& options) const = 0;
};

// Throws c10::NotImplementedError, with the reason, for a class that is not known.
std::unique_ptr<ShardClass> shard_class_of(torch::optim::Optimizer& optimizer);

} // namespace zero::checkpoint
