#include <zero/checkpoint/held.h>

#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

namespace zero::checkpoint {
namespace {

at::Tensor shaped(const Engine& engine, const StoredPart& part) {
  const at::NoGradGuard no_grad;
  const at::Tensor& like = engine.parameter(part.index).tensor;
  if (engine.options().stage > 0 || like.numel() == 0) {
    return engine.options().stage > 0 ? part.values : part.values.view(like.sizes());
  }
  return part.values.as_strided(like.sizes(), like.strides());
}

bool is_kept_apart(const Engine& engine, int64_t index) {
  return engine.is_flat(index) && (engine.options().stage == 3 || engine.has_master(index));
}

} // namespace

std::map<int64_t, at::Tensor> held_values(Engine& engine) {
  std::map<int64_t, at::Tensor> values;
  for (const StoredPart& part : engine.held_parts()) {
    if (part.state.empty() && is_kept_apart(engine, part.index)) {
      values[part.index] = shaped(engine, part);
    }
  }
  return values;
}

std::map<int64_t, std::map<std::string, at::Tensor>> held_state(Engine& engine) {
  std::map<int64_t, std::map<std::string, at::Tensor>> states;
  for (const StoredPart& part : engine.held_parts()) {
    const int64_t steps = engine.step_count(part.index);
    if (steps == 0) {
      continue;
    }
    std::map<std::string, at::Tensor>& state = states[part.index];
    if (part.state.empty()) {
      state["step"] = at::full({}, static_cast<double>(steps), at::kFloat);
    } else {
      state[part.state] = shaped(engine, part);
    }
  }
  return states;
}

void load_held_values(Engine& engine, const std::map<int64_t, at::Tensor>& values) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal(false);
  for (const StoredPart& part : engine.begin_loading()) {
    const auto found = values.find(part.index);
    if (found != values.end()) {
      shaped(engine, part).copy_(found->second);
    }
  }
  engine.end_loading();
}

void load_held_state(
    Engine& engine,
    int64_t index,
    const std::map<std::string, at::Tensor>& state) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal(false);
  std::vector<std::string> names;
  int64_t steps = state.empty() ? 0 : 1; // torch's SGD counts none
  for (const auto& [name, tensor] : state) {
    if (name == "step") {
      steps = static_cast<int64_t>(tensor.to(at::kDouble).item<double>());
    } else {
      names.push_back(name);
    }
  }
  for (const StoredPart& part : engine.load_state(index, names, steps)) {
    shaped(engine, part).copy_(state.at(part.state));
  }
}

} // namespace zero::checkpoint
