#include <zero/optim/zero_optimizer.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <zero/comm/communicator.h>
#include <zero/layout/units.h>
#include <zero/nn/module_tree.h>
#include <zero/optim/shard_options.h>
#include <zero/optim/sharder.h>

namespace zero {
namespace {

using GroupOf = std::unordered_map<const c10::TensorImpl*, int64_t>;

bool is_ignored(const Options& options, const std::string& name) {
  return std::find(options.ignored_params.begin(), options.ignored_params.end(), name) !=
      options.ignored_params.end();
}

// Parameters in order of registration, tied ones once. With `groups`, every
// trainable one needs a group.
std::vector<NamedParameter>
parameters_of(torch::nn::Module& module, const Options& options, const GroupOf* groups) {
  std::vector<NamedParameter> parameters;
  std::unordered_set<const c10::TensorImpl*> seen;
  const auto fixed = nn::parameters_of_batch_norms(module);
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second || is_ignored(options, item.key())) {
      continue;
    }
    int64_t group = 0;
    if (groups != nullptr) {
      const auto found = groups->find(tensor.unsafeGetTensorImpl());
      TORCH_CHECK_VALUE(
          found != groups->end() || !tensor.requires_grad(),
          "[zero.optim] expected every trainable parameter in a group, got none for '",
          item.key(),
          "'; add it to a group, or to ignored_params");
      group = found == groups->end() ? 0 : found->second;
    }
    parameters.push_back(
        {.name = item.key(),
         .tensor = tensor,
         .group = group,
         .keeps_dtype = fixed.count(tensor.unsafeGetTensorImpl()) > 0});
  }
  return parameters;
}

// Gives each parameter its unit; returns the units' names.
std::vector<std::string> assign_units(
    const torch::nn::Module& module,
    const Options& options,
    std::vector<NamedParameter>& parameters) {
  std::unordered_map<const c10::TensorImpl*, int64_t> index_of;
  std::vector<int64_t> numels;
  for (const NamedParameter& parameter : parameters) {
    index_of.emplace(parameter.tensor.unsafeGetTensorImpl(), static_cast<int64_t>(numels.size()));
    numels.push_back(parameter.tensor.numel());
  }
  const layout::UnitLayout units = layout::make_units(
      nn::read_modules(module, index_of, options.units),
      numels,
      {.by_default = options.units.empty(), .min_unit_numel = options.min_unit_numel});
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].unit = units.unit_of_parameter[i];
  }
  return units.names;
}

std::shared_ptr<Engine> make_engine(
    torch::nn::Module& module,
    const Options& options,
    const Ranks& ranks,
    const GroupOf* groups) {
  options.validate();
  std::vector<NamedParameter> parameters = parameters_of(module, options, groups);
  TORCH_CHECK_VALUE(
      !parameters.empty(), "[zero.optim] expected a module with parameters, got none");
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) {
      buffers.emplace_back(item.key(), item.value());
    }
  }
  const auto channels = comm::communicators_of(
      or_launched(ranks, options),
      options.timeout,
      options.stage == 3 ? 2 : 1,
      options.transport,
      options.registered_buffers);
  Units units{.gathers = channels.back()};
  if (options.stage == 3) {
    units.names = assign_units(module, options, parameters);
  }
  auto engine =
      Engine::create(std::move(parameters), std::move(buffers), options, channels.front(), units);
  engine->set_gather_always(true); // modules of C++ don't tell of their forward
  return engine;
}

int64_t index_in(Engine& engine, const at::Tensor& parameter) {
  const int64_t index = engine.index_of(parameter);
  TORCH_CHECK_VALUE(
      index >= 0, "[zero.optim] expected a parameter of this optimizer, got another tensor");
  return index;
}

} // namespace

ZeroOptimizer::ZeroOptimizer(
    torch::nn::Module& module,
    const Options& options,
    const Rule& rule,
    const Ranks& ranks) {
  validate(rule);
  rules_->push_back(rule);
  engine_ = make_engine(module, options, ranks, nullptr);
  lend_rules();
}

ZeroOptimizer::ZeroOptimizer(
    torch::nn::Module& module,
    const Options& options,
    const std::vector<ParameterGroup>& groups,
    const Ranks& ranks) {
  TORCH_CHECK_VALUE(!groups.empty(), "[zero.optim] expected parameter groups, got none");
  GroupOf group_of;
  for (size_t g = 0; g < groups.size(); ++g) {
    validate(groups[g].rule);
    rules_->push_back(groups[g].rule);
    for (const at::Tensor& tensor : groups[g].parameters) {
      TORCH_CHECK_VALUE(
          group_of.emplace(tensor.unsafeGetTensorImpl(), static_cast<int64_t>(g)).second,
          "[zero.optim] expected each parameter in one group, got one twice (again in group ",
          g,
          ")");
    }
  }
  engine_ = make_engine(module, options, ranks, &group_of);
  lend_rules();
}

ZeroOptimizer::ZeroOptimizer(
    torch::nn::Module& module,
    const Options& options,
    const ShardOptimizerFactory& factory,
    const Ranks& ranks) {
  TORCH_CHECK_VALUE(
      !options.step_in_backward,
      "[zero.optim] expected a native rule (AdamW, Adam, SGD, Lion) with step_in_backward, got a "
      "torch::optim optimizer, which steps all parameters at once; leave step_in_backward out");
  engine_ = make_engine(module, options, ranks, nullptr);
  for (int64_t i = 0; i < engine_->parameter_count(); ++i) {
    shards_.push_back(engine_->shard_parameter(i));
  }
  inner_ = factory(shards_);
}

ZeroOptimizer::ZeroOptimizer(torch::nn::Module& module, Sharder sharder, const Rule& rule) {
  validate(rule);
  rules_->push_back(rule);
  engine_ = sharder.finish(module);
  lend_rules();
}

void ZeroOptimizer::lend_rules() {
  if (engine_->options().step_in_backward) {
    engine_->set_rule_source([rules = rules_] { return *rules; });
  }
}

void ZeroOptimizer::register_comm_hook(std::shared_ptr<CommHook> hook) {
  engine_->register_comm_hook(std::move(hook));
}

ZeroOptimizer::~ZeroOptimizer() = default;
ZeroOptimizer::ZeroOptimizer(ZeroOptimizer&&) noexcept = default;
ZeroOptimizer& ZeroOptimizer::operator=(ZeroOptimizer&&) noexcept = default;

bool ZeroOptimizer::step() {
  return inner_ ? step_shards() : engine_->step(*rules_);
}

bool ZeroOptimizer::step_shards() {
  if (!engine_->begin_step(engine_->joining() ? optim::pack_options(*inner_) : std::string())) {
    return false;
  }
  for (at::Tensor& shard : shards_) {
    shard.mutable_grad().reset();
  }
  for (const int64_t index : engine_->stepping()) {
    if (shards_[index].numel() == 0) { // was frozen
      shards_[index].set_data(engine_->shard_parameter(index));
    }
    shards_[index].mutable_grad() = engine_->stepping_gradient(index);
  }
  inner_->step();
  engine_->end_step();
  return true;
}

void ZeroOptimizer::follow_step(const std::string& hyperparameters) {
  const optim::OptionsScope theirs(*inner_, hyperparameters);
  step_shards();
}

void ZeroOptimizer::zero_grad(bool set_to_none) {
  engine_->zero_grad(set_to_none);
}

GradNorm
ZeroOptimizer::clip_grad_norm_(double max_norm, double norm_type, bool error_if_nonfinite) {
  return engine_->clip_grad_norm(max_norm, norm_type, error_if_nonfinite);
}

void ZeroOptimizer::clip_grad_value_(double clip_value) {
  engine_->clip_grad_value(clip_value);
}

double ZeroOptimizer::divide_grad_(double divisor, bool across_ranks) {
  return engine_->divide_gradients(divisor, across_ranks);
}

GradNorm ZeroOptimizer::grad_norm(double norm_type) {
  return engine_->grad_norm(norm_type);
}

std::vector<GradNorm> ZeroOptimizer::grad_norms(double norm_type) {
  std::vector<GradNorm> norms = engine_->grad_norms(norm_type);
  while (norms.size() < rules_->size()) { // groups without parameters
    norms.emplace_back(at::zeros({}, norms.front().tensor().options()));
  }
  return norms;
}

void ZeroOptimizer::synchronize() {
  engine_->synchronize();
}

void ZeroOptimizer::gathered(const std::function<void()>& body, bool writeback) {
  std::vector<int64_t> all(engine_->parameter_count());
  std::iota(all.begin(), all.end(), 0);
  engine_->hold(all, writeback);
  try {
    body();
  } catch (...) {
    engine_->let_go(all, writeback);
    throw;
  }
  engine_->let_go(all, writeback);
}

void ZeroOptimizer::release() {
  engine_->release_parameters();
}

ZeroOptimizer::NoSync::NoSync(std::shared_ptr<Engine> engine)
    : engine_(std::move(engine)), before_(engine_->requires_gradient_sync()) {
  engine_->set_requires_gradient_sync(false);
}

ZeroOptimizer::NoSync::~NoSync() {
  engine_->set_requires_gradient_sync(before_);
}

ZeroOptimizer::NoSync ZeroOptimizer::no_sync() {
  return NoSync(engine_);
}

Rule& ZeroOptimizer::rule(size_t group) {
  TORCH_CHECK_INDEX(
      group < rules_->size(),
      "[zero.optim] expected a group index below ",
      rules_->size(),
      ", got ",
      group);
  return (*rules_)[group];
}

size_t ZeroOptimizer::group_count() const {
  return rules_->size();
}

void ZeroOptimizer::set_lr(double lr) {
  for (Rule& rule : *rules_) {
    std::visit([lr](auto& concrete) { concrete.lr = lr; }, rule);
  }
  if (inner_) {
    for (auto& group : inner_->param_groups()) {
      group.options().set_lr(lr);
    }
  }
}

Engine& ZeroOptimizer::engine() {
  return *engine_;
}

torch::optim::Optimizer* ZeroOptimizer::inner() {
  return inner_.get();
}

const std::vector<at::Tensor>& ZeroOptimizer::shards() {
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (shards_[i].numel() == 0) { // was frozen
      shards_[i].set_data(engine_->shard_parameter(static_cast<int64_t>(i)));
    }
  }
  return shards_;
}

at::Tensor full_param(ZeroOptimizer& optimizer, const at::Tensor& parameter) {
  return optimizer.engine().full_parameter(index_in(optimizer.engine(), parameter));
}

at::Tensor full_grad(ZeroOptimizer& optimizer, const at::Tensor& parameter) {
  return optimizer.engine().full_gradient(index_in(optimizer.engine(), parameter));
}

std::map<std::string, at::Tensor> full_state(
    ZeroOptimizer& optimizer,
    const at::Tensor& parameter) {
  return optimizer.engine().full_state(index_in(optimizer.engine(), parameter));
}

std::string report(ZeroOptimizer& optimizer) {
  return optimizer.engine().report_table();
}

} // namespace zero
