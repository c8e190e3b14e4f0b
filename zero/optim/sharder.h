#pragma once

// Building a model that is too large for one rank: constructed and sharded module
// by module, so that at most one of them is whole at a time.
//
//   zero::Sharder sharder({.stage = 3});
//   for (int64_t i = 0; i < layers; ++i) {
//     blocks->push_back(sharder.shard(std::make_shared<Block>(), name_of(i)));
//   }
//   ... the rest of the model ...
//   zero::ZeroOptimizer optimizer(*model, std::move(sharder), zero::AdamW{});

#include <memory>
#include <string>

#include <zero/optim/zero_optimizer.h>

namespace zero {

class ZERO_API Sharder {
 public:
  // `options.stage` must be 3; `ranks` as in ZeroOptimizer. Throws as it does.
  explicit Sharder(const Options& options, Ranks ranks = {});

  // [collective] Shards a module as one unit, with rank 0's values. `name` is what
  // it is called in the whole model ("blocks.3"), the same on every rank; its
  // parameters are named after it. Parameters that are sharded already (tied ones)
  // stay where they are.
  void shard(torch::nn::Module& module, const std::string& name);
  template <typename Module>
  std::shared_ptr<Module> shard(std::shared_ptr<Module> module, const std::string& name) {
    shard(*module, name);
    return module;
  }

 private:
  friend class ZeroOptimizer;
  // Of the whole model: what is not sharded yet joins the root's unit.
  std::shared_ptr<Engine> finish(torch::nn::Module& module);
  void add(torch::nn::Module& module, const std::string& prefix, bool root);

  Options options_;
  Ranks ranks_;
  std::shared_ptr<Engine> engine_;
};

} // namespace zero
