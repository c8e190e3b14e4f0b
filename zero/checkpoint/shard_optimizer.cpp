#include <zero/checkpoint/shard_optimizer.h>

#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <nlohmann/json.hpp>
#include <torch/optim/optimizer.h>

#include <zero/checkpoint/shard_classes.h>
#include <zero/checkpoint/together.h>

namespace zero::checkpoint {
namespace {

using Json = nlohmann::json;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;

// Names of the parameters of each of its groups.
std::vector<std::vector<std::string>> names_by_group(ZeroOptimizer& optimizer) {
  std::unordered_map<const c10::TensorImpl*, std::string> name_of;
  const std::vector<at::Tensor>& shards = optimizer.shards();
  for (size_t i = 0; i < shards.size(); ++i) {
    name_of[shards[i].unsafeGetTensorImpl()] =
        optimizer.engine().parameter(static_cast<int64_t>(i)).name;
  }
  std::vector<std::vector<std::string>> names;
  for (const auto& group : optimizer.inner()->param_groups()) {
    names.emplace_back();
    for (const at::Tensor& shard : group.params()) {
      names.back().push_back(name_of.at(shard.unsafeGetTensorImpl()));
    }
  }
  return names;
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "" : ", ") + name;
  }
  return text;
}

Json own_steps(ZeroOptimizer& optimizer, const ShardClass& kind) {
  Json steps = Json::object();
  const std::vector<at::Tensor>& shards = optimizer.shards();
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto found = optimizer.inner()->state().find(shards[i].unsafeGetTensorImpl());
    if (found == optimizer.inner()->state().end() || shards[i].numel() == 0) {
      continue;
    }
    if (const int64_t* count = kind.steps(*found->second)) {
      steps[optimizer.engine().parameter(static_cast<int64_t>(i)).name] = *count;
    }
  }
  return steps;
}

} // namespace

std::vector<ForeignState> shard_state(ZeroOptimizer& optimizer) {
  const auto kind = shard_class_of(*optimizer.inner());
  std::vector<ForeignState> states;
  const std::vector<at::Tensor>& shards = optimizer.shards();
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto found = optimizer.inner()->state().find(shards[i].unsafeGetTensorImpl());
    if (found == optimizer.inner()->state().end() || shards[i].numel() == 0) {
      continue;
    }
    for (auto& [name, tensor] : kind->tensors(*found->second)) {
      states.push_back({static_cast<int64_t>(i), name, tensor.detach()});
    }
  }
  return states;
}

std::string shard_optimizer_to_json(ZeroOptimizer& optimizer, const std::string& doing) {
  const auto kind = shard_class_of(*optimizer.inner());
  Json json;
  json["rule"] = kind->name();
  json["groups"] = Json::array();
  const auto names = names_by_group(optimizer);
  for (size_t g = 0; g < names.size(); ++g) {
    Json group = Json::parse(kind->write(optimizer.inner()->param_groups()[g].options()));
    group["params"] = names[g];
    json["groups"].push_back(std::move(group));
  }
  json["scalars"] = Json::object();
  const Together ranks(&optimizer.engine(), doing);
  for (const std::string& text : ranks.run([&] { return own_steps(optimizer, *kind).dump(); })) {
    const Json of_rank = Json::parse(text);
    for (const auto& [name, steps] : of_rank.items()) {
      json["scalars"][name]["step"] = steps;
    }
  }
  return json.dump();
}

ShardOptimizerLoader::ShardOptimizerLoader(
    Checkpoint& checkpoint,
    ZeroOptimizer& optimizer,
    std::string directory)
    : checkpoint_(checkpoint), optimizer_(optimizer), directory_(std::move(directory)) {
  const auto kind = shard_class_of(*optimizer.inner());
  try {
    const Json json = Json::parse(checkpoint.manifest().optimizer);
    TORCH_CHECK_VALUE(
        json.is_object(),
        "[zero.checkpoint] expected an optimizer in '",
        directory_,
        "', got a checkpoint that was saved without one");
    const auto names = names_by_group(optimizer);
    const Json& groups = json.at("groups");
    TORCH_CHECK_VALUE(
        groups.size() == names.size(),
        "[zero.checkpoint] expected ",
        names.size(),
        " groups in '",
        directory_,
        "', got ",
        groups.size());
    for (size_t g = 0; g < names.size(); ++g) {
      TORCH_CHECK_VALUE(
          groups[g].at("params").get<std::vector<std::string>>() == names[g],
          "[zero.checkpoint] expected group ",
          g,
          " of '",
          directory_,
          "' to hold the parameters that it has in this optimizer: ",
          listed(names[g]));
      kind->read(*optimizer.inner()->param_groups()[g].options().clone(), groups[g].dump());
    }
    for (const auto& [name, scalars] : json.at("scalars").items()) {
      if (scalars.contains("step")) {
        steps_[name] = static_cast<int64_t>(scalars.at("step").get<double>());
      }
    }
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(
        false,
        "[zero.checkpoint] expected an optimizer section in the manifest of '",
        directory_,
        "', got one that can't be read: ",
        error.what());
  }
  check_state();
}

void ShardOptimizerLoader::check_state() const {
  const auto kind = shard_class_of(*optimizer_.inner());
  const std::vector<std::string> allowed = kind->tensor_names();
  std::vector<std::string> parameters;
  for (int64_t i = 0; i < optimizer_.engine().parameter_count(); ++i) {
    parameters.push_back(optimizer_.engine().parameter(i).name);
  }
  checkpoint_.require_state(
      allowed, "torch::optim::" + kind->name() + " (" + listed(allowed) + ")", parameters);
}

void ShardOptimizerLoader::load() {
  const at::NoGradGuard no_grad;
  Engine& engine = optimizer_.engine();
  Optimizer& inner = *optimizer_.inner();
  const auto kind = shard_class_of(inner);
  const Json groups = Json::parse(checkpoint_.manifest().optimizer).at("groups");
  std::unordered_map<const c10::TensorImpl*, OptimizerOptions*> options_of;
  for (size_t g = 0; g < inner.param_groups().size(); ++g) {
    OptimizerOptions& options = inner.param_groups()[g].options();
    kind->read(options, groups[g].dump());
    for (const at::Tensor& shard : inner.param_groups()[g].params()) {
      options_of[shard.unsafeGetTensorImpl()] = &options;
    }
  }
  std::vector<int64_t> with_state;
  for (int64_t i = 0; i < engine.parameter_count(); ++i) {
    if (!checkpoint_.state_of(engine.parameter(i).name).empty()) {
      with_state.push_back(i);
    }
  }
  engine.make_trainable(with_state);
  const Together ranks(&engine, "loading '" + directory_ + "'");
  ranks.run([&] {
    const std::vector<at::Tensor>& shards = optimizer_.shards();
    for (size_t i = 0; i < shards.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      const at::Tensor& shard = shards[i];
      const std::string& name = engine.parameter(index).name;
      std::map<std::string, at::Tensor> tensors;
      for (const std::string& state : checkpoint_.state_of(name)) {
        if (shard.numel() > 0) {
          tensors[state] = checkpoint_.read_state(engine, index, state).to(shard.options());
        }
      }
      const auto steps = steps_.find(name);
      auto made = tensors.empty() ? kind->fresh(shard, *options_of.at(shard.unsafeGetTensorImpl()))
                                  : kind->make(tensors, steps == steps_.end() ? 1 : steps->second);
      if (made) {
        inner.state()[shard.unsafeGetTensorImpl()] = std::move(made);
      } else {
        inner.state().erase(shard.unsafeGetTensorImpl());
      }
    }
    return std::string();
  });
}

} // namespace zero::checkpoint
