#include <zero/checkpoint/checkpoint.h>

#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <zero/checkpoint/averages.h>
#include <zero/checkpoint/load.h>
#include <zero/checkpoint/rules_json.h>
#include <zero/checkpoint/save.h>
#include <zero/checkpoint/shard_optimizer.h>
#include <zero/checkpoint/together.h>
#include <zero/checkpoint/weights.h>
#include <zero/optim/zero_optimizer.h>

namespace zero {
namespace {

using checkpoint::Contents;
using checkpoint::OptimizerSection;
using checkpoint::TensorKind;

Contents contents_of(torch::nn::Module& module, ZeroOptimizer* optimizer) {
  Contents contents;
  if (optimizer != nullptr) {
    contents.engine = optimizer->engine().shared_from_this();
    contents.native_state = optimizer->inner() == nullptr;
  }
  std::unordered_map<const c10::TensorImpl*, std::string> first;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    const auto [found, added] = first.emplace(tensor.unsafeGetTensorImpl(), item.key());
    if (!added) {
      contents.tied.emplace_back(item.key(), found->second);
      continue;
    }
    const int64_t index = contents.engine ? contents.engine->index_of(tensor) : -1;
    if (index < 0 || !contents.engine->is_flat(index)) {
      contents.loose.push_back({item.key(), tensor, TensorKind::parameter});
    }
  }
  for (const auto& item : module.named_buffers()) {
    if (!item.value().defined()) {
      continue;
    }
    const auto [found, added] = first.emplace(item.value().unsafeGetTensorImpl(), item.key());
    if (added) {
      contents.loose.push_back({item.key(), item.value(), TensorKind::buffer});
    } else {
      contents.tied.emplace_back(item.key(), found->second);
    }
  }
  return contents;
}

OptimizerSection section_of(ZeroOptimizer& optimizer) {
  OptimizerSection section;
  for (size_t g = 0; g < optimizer.group_count(); ++g) {
    section.groups.push_back({optimizer.rule(g), {}});
  }
  const Engine& engine = optimizer.engine();
  for (int64_t i = 0; i < engine.parameter_count(); ++i) {
    const NamedParameter& parameter = engine.parameter(i);
    section.groups.at(parameter.group).parameters.push_back(parameter.name);
    if (const int64_t steps = engine.step_count(i); steps > 0) {
      section.steps[parameter.name] = steps;
    }
  }
  return section;
}

// [collective]
std::string describe(ZeroOptimizer& optimizer, const std::string& directory) {
  return optimizer.inner() == nullptr
      ? checkpoint::to_json(section_of(optimizer))
      : checkpoint::shard_optimizer_to_json(optimizer, "saving '" + directory + "'");
}

// A rule's state, checked and then loaded.
class RuleLoader {
 public:
  RuleLoader(checkpoint::Checkpoint& saved, ZeroOptimizer& optimizer, const std::string& directory)
      : saved_(saved), optimizer_(optimizer) {
    section_ = checkpoint::optimizer_from_json(
        saved.manifest().optimizer, section_of(optimizer), directory);
    for (const auto& group : section_.groups) {
      saved.require_state(group.rule, group.parameters);
      for (const std::string& name : group.parameters) {
        if (!saved.state_of(name).empty()) {
          section_.steps.emplace(name, 1); // torch's SGD counts none
        }
      }
    }
  }
  void load() {
    saved_.load_native_state(optimizer_.engine(), section_.steps, /*verify=*/false);
    for (size_t g = 0; g < section_.groups.size(); ++g) {
      optimizer_.rule(g) = section_.groups[g].rule;
    }
  }

 private:
  checkpoint::Checkpoint& saved_;
  ZeroOptimizer& optimizer_;
  OptimizerSection section_;
};

std::string random_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  return {static_cast<const char*>(state.const_data_ptr()), static_cast<size_t>(state.numel())};
}

void set_random_state(const std::string& bytes) {
  const at::Tensor state = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

struct Saved {
  Contents contents;
  checkpoint::SaveOptions options;
};

// [collective]
Saved what_to_save(
    const std::string& directory,
    torch::nn::Module& module,
    ZeroOptimizer* optimizer,
    const SaveSettings& settings) {
  Saved saved{
      contents_of(module, optimizer), {.extra = settings.extra, .keep_last = settings.keep_last}};
  if (optimizer != nullptr) {
    saved.options.optimizer = describe(*optimizer, directory);
    if (!saved.contents.native_state) {
      saved.contents.foreign = checkpoint::shard_state(*optimizer);
    }
  }
  std::optional<checkpoint::EMASettings> ema;
  if (settings.ema != nullptr) {
    for (auto& average : checkpoint::averages_of(*settings.ema, saved.contents.engine.get())) {
      saved.contents.foreign.push_back(std::move(average));
    }
    ema = {settings.ema->decay(), settings.ema->updates()};
  }
  const checkpoint::Together ranks(saved.contents.engine.get(), "saving '" + directory + "'");
  saved.options.scalars =
      checkpoint::scalars_to_json(ranks.run([] { return random_state(); }), ema);
  return saved;
}

} // namespace

void save(
    const std::string& directory,
    torch::nn::Module& module,
    ZeroOptimizer* optimizer,
    const SaveSettings& settings) {
  const Saved saved = what_to_save(directory, module, optimizer, settings);
  checkpoint::save(directory, saved.contents, saved.options);
}

std::shared_ptr<BackgroundSave> async_save(
    const std::string& directory,
    torch::nn::Module& module,
    ZeroOptimizer* optimizer,
    const SaveSettings& settings) {
  const Saved saved = what_to_save(directory, module, optimizer, settings);
  return checkpoint::async_save(directory, saved.contents, saved.options);
}

std::string load(
    const std::string& directory,
    torch::nn::Module& module,
    ZeroOptimizer* optimizer,
    const LoadSettings& settings) {
  const bool with_state = optimizer != nullptr && settings.optimizer_state;
  const Contents contents = contents_of(module, optimizer);
  checkpoint::Checkpoint saved(directory, contents.engine.get());
  std::optional<RuleLoader> rules;
  std::optional<checkpoint::ShardOptimizerLoader> shards;
  if (settings.ema != nullptr) {
    checkpoint::require_averages(saved, *settings.ema, contents.engine.get());
  }
  if (with_state) {
    if (optimizer->inner() == nullptr) {
      rules.emplace(saved, *optimizer, directory);
    } else {
      shards.emplace(saved, *optimizer, directory);
    }
  }
  if (settings.verify && (with_state || settings.ema != nullptr)) {
    saved.verify_state(contents.engine.get());
  }
  saved.load_model(contents, {.strict = settings.strict, .verify = settings.verify});
  if (rules) {
    rules->load();
  }
  if (shards) {
    shards->load();
  }
  if (settings.ema != nullptr) {
    checkpoint::load_averages(saved, *settings.ema);
  }
  const int64_t rank = contents.engine ? contents.engine->rank() : 0;
  const std::string state = checkpoint::rng_from_json(saved.manifest().scalars, rank);
  if (settings.rng && !state.empty()) {
    set_random_state(state);
  }
  return saved.manifest().extra;
}

void load_weights(
    const std::string& file,
    torch::nn::Module& module,
    ZeroOptimizer* optimizer,
    const LoadWeightsSettings& settings) {
  checkpoint::load_weights(
      checkpoint::safetensors_source(file), contents_of(module, optimizer), settings.strict);
}

} // namespace zero
