#pragma once

// Any elementwise torch::optim class on shards:
//   zero::ZeroOptimizer optimizer(
//       model, {.stage = 2},
//       zero::elementwise<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3)));
// Its arithmetic is ATen's, whose vector tails round differently than its vector
// bodies: stages agree to within rounding, not bit for bit as native rules do.

#include <type_traits>

#include <torch/optim/optimizer.h>

#include <zero/optim/zero_optimizer.h>

namespace torch::optim {
class LBFGS;
} // namespace torch::optim

namespace zero {

template <typename Optimizer, typename OptimizerOptions>
ShardOptimizerFactory elementwise(OptimizerOptions options) {
  static_assert(
      !std::is_same_v<Optimizer, torch::optim::LBFGS>,
      "LBFGS needs inner products over the whole gradient and can't run on shards");
  return [options](std::vector<at::Tensor> shards) {
    return std::make_unique<Optimizer>(std::move(shards), options);
  };
}

} // namespace zero
