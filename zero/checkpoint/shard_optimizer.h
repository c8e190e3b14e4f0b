#pragma once

// torch::optim optimizers that step shards (ShardOptimizerFactory), as checkpoints hold
// them: state tensors and hyper-parameters under the names that torch.optim has for them,
// so that the same class of Python, or a native rule, takes them too. Internal.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <zero/checkpoint/contents.h>
#include <zero/checkpoint/load.h>
#include <zero/optim/zero_optimizer.h>

namespace zero::checkpoint {

// State tensors of this rank. Throws c10::NotImplementedError for a class whose state is
// not known, or can't be split (LBFGS), as all functions here do.
std::vector<ForeignState> shard_state(ZeroOptimizer& optimizer);
// [collective] The manifest's optimizer section. `doing` is for errors.
std::string shard_optimizer_to_json(ZeroOptimizer& optimizer, const std::string& doing);

// Of a checkpoint, into such an optimizer.
class ShardOptimizerLoader {
 public:
  // Throws c10::ValueError for another section than one of this optimizer's class, groups
  // and parameters; nothing is changed.
  ShardOptimizerLoader(Checkpoint& checkpoint, ZeroOptimizer& optimizer, std::string directory);
  // [collective] State and hyper-parameters; parameters without state lose theirs.
  void load();

 private:
  void check_state() const;

  Checkpoint& checkpoint_;
  ZeroOptimizer& optimizer_;
  std::string directory_;
  std::map<std::string, int64_t> steps_; // by parameter
};

} // namespace zero::checkpoint
