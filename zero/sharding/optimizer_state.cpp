#include <zero/sharding/optimizer_state.h>

#include <algorithm>
#include <utility>

namespace zero::sharding {
namespace {

using Names = std::vector<std::string>;

// Of Adam and AdamW with amsgrad. Switched off, the maximum stays as it was.
constexpr const char* kMaximum = "max_exp_avg_sq";

bool is_with_maximum(const Names& longer, const Names& names) {
  return longer.size() == names.size() + 1 && longer.back() == kMaximum &&
      std::equal(names.begin(), names.end(), longer.begin());
}

std::string joined(const Names& names) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "" : ", ") + name;
  }
  return text;
}

template <typename AdamLike>
const Names& adam_names(const AdamLike& rule) {
  static const Names plain{"exp_avg", "exp_avg_sq"};
  static const Names with_maximum{"exp_avg", "exp_avg_sq", kMaximum};
  return rule.amsgrad ? with_maximum : plain;
}

const Names& names_of(const AdamW& rule) {
  return adam_names(rule);
}

const Names& names_of(const Adam& rule) {
  return adam_names(rule);
}

const Names& names_of(const SGD& rule) {
  static const Names none;
  static const Names momentum{"momentum_buffer"};
  return rule.momentum == 0.0 ? none : momentum;
}

const Names& names_of(const Lion& /*rule*/) {
  static const Names average{"exp_avg"};
  return average;
}

} // namespace

const std::vector<std::string>& state_names(const Rule& rule) {
  return std::visit([](const auto& concrete) -> const Names& { return names_of(concrete); }, rule);
}

OptimizerStateManager::OptimizerStateManager(
    ParameterTable& table,
    std::shared_ptr<memory::Account> account,
    bool on_host)
    : table_(table), account_(std::move(account)), steps_(table, on_host) {}

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
  if (names.empty() || found.names == names || is_with_maximum(found.names, names)) {
    return found.tensors;
  }
  TORCH_CHECK_VALUE(
      found.tensors.empty() || is_with_maximum(names, found.names),
      "[zero.optim] expected the parameters of ",
      table_.bucket(bucket).what,
      " to keep their optimizer rule, with state ",
      joined(found.names),
      ", got one with ",
      joined(names),
      "; make a new optimizer");
  for (size_t i = found.tensors.size(); i < names.size(); ++i) {
    found.tensors.emplace_back(numel, options, memory::Purpose::optimizer_state, account_);
  }
  found.names = names;
  return found.tensors;
}

int64_t OptimizerStateManager::first_stepped(int64_t bucket) const {
  for (const int64_t index : table_.bucket(bucket).layout.parameters) {
    if (steps_.any(index)) {
      return index;
    }
  }
  return -1;
}

void OptimizerStateManager::require(int64_t bucket, const std::vector<std::string>& names) const {
  const Entry& found = entry(bucket);
  const int64_t stepped = first_stepped(bucket);
  TORCH_CHECK_VALUE(
      stepped < 0 || !is_with_maximum(names, found.names),
      "[zero.optim] expected amsgrad as it was in the first step, got amsgrad=true for parameter '",
      table_.entry(stepped < 0 ? 0 : stepped).parameter.name,
      "', whose state is ",
      joined(found.names),
      " without ",
      kMaximum,
      " (rank ",
      table_.rank(),
      " of ",
      table_.world_size(),
      "); nothing was changed: set amsgrad before the first step, or load state that has it");
}

void OptimizerStateManager::clear_unused(int64_t bucket) {
  if (first_stepped(bucket) < 0) {
    entry(bucket) = {};
  }
}

const std::vector<memory::FlatBuffer>& OptimizerStateManager::existing(int64_t bucket) const {
  return entry(bucket).tensors;
}

const std::vector<std::string>& OptimizerStateManager::names(int64_t bucket) const {
  return entry(bucket).names;
}

} // namespace zero::sharding
