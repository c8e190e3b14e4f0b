#pragma once

// OptimizerStateManager: the moments of native rules, flat, for the elements that
// this rank updates (its shard; everything at stage 0), and each parameter's own
// step count.

#include <memory>
#include <string>
#include <vector>

#include <zero/options.h>
#include <zero/sharding/parameter_table.h>
#include <zero/sharding/step_counts.h>

namespace zero::sharding {

// Names of a rule's state tensors, as torch.optim has them.
const std::vector<std::string>& state_names(const Rule& rule);

class OptimizerStateManager {
 public:
  // `on_host`: as of StepCounts.
  OptimizerStateManager(
      ParameterTable& table,
      std::shared_ptr<memory::Account> account,
      bool on_host);

  // State tensors of a bucket over `numel` elements, those of `names` first, zero at
  // first; `options` are those of what is stepped. Throws where the bucket has state of
  // another rule.
  const std::vector<memory::FlatBuffer>& tensors(
      int64_t bucket,
      const std::vector<std::string>& names,
      const at::TensorOptions& options,
      int64_t numel);
  // Before anything is stepped: throws, naming a parameter, where the bucket's state was
  // begun without what a rule with these names needs.
  void require(int64_t bucket, const std::vector<std::string>& names) const;
  // Lets state go that no parameter of the bucket has any more.
  void clear_unused(int64_t bucket);
  // Empty before the bucket's first step.
  const std::vector<memory::FlatBuffer>& existing(int64_t bucket) const;
  const std::vector<std::string>& names(int64_t bucket) const;

  StepCounts& steps() {
    return steps_;
  }

 private:
  struct Entry {
    std::vector<std::string> names;
    std::vector<memory::FlatBuffer> tensors;
  };
  Entry& entry(int64_t bucket) const;
  // The bucket's first parameter that was stepped; -1 without.
  int64_t first_stepped(int64_t bucket) const;

  ParameterTable& table_;
  std::shared_ptr<memory::Account> account_;
  mutable std::vector<Entry> entries_;
  StepCounts steps_;
};

} // namespace zero::sharding
