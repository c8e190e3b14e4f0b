#include <zero/optim/sharder.h>

#include <algorithm>
#include <utility>

#include <torch/nn/module.h>

#include <zero/comm/communicator.h>
#include <zero/nn/module_tree.h>

namespace zero {

Sharder::Sharder(const Options& options, Ranks ranks)
    : options_(options), ranks_(std::move(ranks)) {
  options_.validate();
  TORCH_CHECK_VALUE(
      options_.stage == 3,
      "[zero.optim] expected stage 3, where parameters are sharded, got stage ",
      options_.stage,
      "; build the module whole and give it to ZeroOptimizer");
}

void Sharder::shard(torch::nn::Module& module, const std::string& name) {
  TORCH_CHECK_VALUE(
      !name.empty(), "[zero.optim] expected the module's name in the whole model, got none");
  add(module, name + ".", /*root=*/false);
}

void Sharder::add(torch::nn::Module& module, const std::string& prefix, bool root) {
  const std::vector<std::string> known =
      engine_ ? engine_->unit_names() : std::vector<std::string>{""};
  const int64_t unit = root ? 0 : static_cast<int64_t>(known.size());
  std::vector<NamedParameter> parameters;
  const auto fixed = nn::parameters_of_batch_norms(module);
  for (const auto& item : module.named_parameters()) {
    const std::string name = prefix + item.key();
    const auto& ignored = options_.ignored_params;
    const bool taken = (engine_ && engine_->index_of(item.value()) >= 0) ||
        std::find(ignored.begin(), ignored.end(), name) != ignored.end();
    if (!taken) {
      parameters.push_back(
          {.name = name,
           .tensor = item.value(),
           .unit = unit,
           .keeps_dtype = fixed.count(item.value().unsafeGetTensorImpl()) > 0});
    }
  }
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) {
      buffers.emplace_back(prefix + item.key(), item.value());
    }
  }
  std::vector<std::string> names;
  if (!root) {
    names.push_back(prefix.substr(0, prefix.size() - 1));
  }
  if (engine_) {
    engine_->add_parameters(std::move(parameters), std::move(buffers), std::move(names));
    return;
  }
  const Ranks ranks = or_launched(ranks_, options_);
  const auto channels = comm::communicators_of(
      ranks, options_.timeout, 2, options_.transport, options_.registered_buffers);
  Units units{.gathers = channels.back()};
  units.names.insert(units.names.end(), names.begin(), names.end());
  engine_ =
      Engine::create(std::move(parameters), std::move(buffers), options_, channels.front(), units);
  engine_->set_gather_always(true);
}

std::shared_ptr<Engine> Sharder::finish(torch::nn::Module& module) {
  add(module, "", /*root=*/true);
  return std::move(engine_);
}

} // namespace zero
