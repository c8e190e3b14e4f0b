#pragma once

// Hyper-parameters of a torch::optim optimizer as bytes, for ranks that follow its steps.

#include <memory>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
class OptimizerOptions;
} // namespace torch::optim

namespace zero::optim {

std::string pack_options(torch::optim::Optimizer& optimizer);

// While it lives, every group of the optimizer has the packed ones instead of its own.
class OptionsScope {
 public:
  OptionsScope(torch::optim::Optimizer& optimizer, const std::string& packed);
  ~OptionsScope();
  OptionsScope(const OptionsScope&) = delete;
  OptionsScope& operator=(const OptionsScope&) = delete;

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> own_;
};

} // namespace zero::optim
