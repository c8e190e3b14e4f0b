#include <zero/checkpoint/checkpoint.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <zero/checkpoint/load.h>
#include <zero/checkpoint/rules_json.h>
#include <zero/checkpoint/save.h>
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
    contents.native_state = optimizer->group_count() > 0;
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

void require_native(ZeroOptimizer& optimizer) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      optimizer.group_count() > 0,
      "[zero.checkpoint] state of a torch::optim optimizer on shards can't be saved or loaded; use "
      "a native rule, or optimizer_state = false to load the module alone");
}

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

// [collective]
checkpoint::SaveOptions
options_of(const std::string& directory, ZeroOptimizer* optimizer, const SaveSettings& settings) {
  checkpoint::SaveOptions options{.extra = settings.extra, .keep_last = settings.keep_last};
  Engine* engine = nullptr;
  if (optimizer != nullptr) {
    require_native(*optimizer);
    options.optimizer = checkpoint::to_json(section_of(*optimizer));
    engine = &optimizer->engine();
  }
  const checkpoint::Together ranks(engine, "saving '" + directory + "'");
  options.scalars = checkpoint::rng_to_json(ranks.run([] { return random_state(); }));
  return options;
}

} // namespace

void save(
    const std::string& directory,
    torch::nn::Module& module,
    ZeroOptimizer* optimizer,
    const SaveSettings& settings) {
  checkpoint::save(
      directory, contents_of(module, optimizer), options_of(directory, optimizer, settings));
}

std::shared_ptr<BackgroundSave> async_save(
    const std::string& directory,
    torch::nn::Module& module,
    ZeroOptimizer* optimizer,
    const SaveSettings& settings) {
  return checkpoint::async_save(
      directory, contents_of(module, optimizer), options_of(directory, optimizer, settings));
}

std::string load(
    const std::string& directory,
    torch::nn::Module& module,
    ZeroOptimizer* optimizer,
    const LoadSettings& settings) {
  const Contents contents = contents_of(module, optimizer);
  checkpoint::Checkpoint saved(directory, contents.engine.get());
  const bool with_state = optimizer != nullptr && settings.optimizer_state;
  OptimizerSection section;
  if (with_state) {
    require_native(*optimizer);
    section = checkpoint::optimizer_from_json(
        saved.manifest().optimizer, section_of(*optimizer), directory);
    for (const auto& group : section.groups) {
      saved.require_state(group.rule, group.parameters);
    }
    if (settings.verify) {
      saved.verify_state(contents.engine.get());
    }
  }
  saved.load_model(contents, {.strict = settings.strict, .verify = settings.verify});
  if (with_state) {
    saved.load_native_state(*contents.engine, section.steps, /*verify=*/false);
    for (size_t g = 0; g < section.groups.size(); ++g) {
      optimizer->rule(g) = section.groups[g].rule;
    }
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
