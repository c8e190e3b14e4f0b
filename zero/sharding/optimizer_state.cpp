#include <zero/sharding/optimizer_state.h>

#include <utility>

namespace zero::sharding {

std::vector<std::string> state_names(const Rule& rule) {
  if (const auto* sgd = std::get_if<SGD>(&rule)) {
    return sgd->momentum == 0.0 ? std::vector<std::string>{}
                                : std::vector<std::string>{"momentum_buffer"};
  }
  return {"exp_avg", "exp_avg_sq"};
}

OptimizerStateManager::OptimizerStateManager(
    ParameterTable& table,
    std::shared_ptr<memory::Account> account)
    : table_(table), account_(std::move(account)) {}

OptimizerStateManager::Entry& OptimizerStateManager::entry(int64_t bucket) const {
  if (static_cast<int64_t>(entries_.size()) <= bucket) {
    entries_.resize(table_.bucket_count());
  }
  return entries_[bucket];
}

const std::vector<memory::FlatBuffer>& OptimizerStateManager::tensors(
    int64_t bucket,
    const std::vector<std::string>& names,
    const at::TensorOptions& options,
    int64_t numel) {
  Entry& found = entry(bucket);
  if (names.empty() || found.names == names) {
    return found.tensors;
  }
  TORCH_CHECK_VALUE(
      found.tensors.empty(),
      "[zero.optim] expected the parameters of ",
      table_.bucket(bucket).what,
      " to keep their optimizer rule, got another that has other state; make a new optimizer");
  for (size_t i = 0; i < names.size(); ++i) {
    found.tensors.emplace_back(numel, options, memory::Purpose::optimizer_state, account_);
  }
  found.names = names;
  return found.tensors;
}

const std::vector<memory::FlatBuffer>& OptimizerStateManager::existing(int64_t bucket) const {
  return entry(bucket).tensors;
}

const std::vector<std::string>& OptimizerStateManager::names(int64_t bucket) const {
  return entry(bucket).names;
}

int64_t& OptimizerStateManager::step_count(int64_t parameter) {
  if (static_cast<int64_t>(steps_.size()) < table_.size()) {
    steps_.resize(table_.size(), 0);
  }
  return steps_[parameter];
}

} // namespace zero::sharding
