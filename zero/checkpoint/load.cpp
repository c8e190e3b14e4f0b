#include <zero/checkpoint/load.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <zero/checkpoint/directory.h>
#include <zero/checkpoint/permute.h>
#include <zero/checkpoint/save.h>
#include <zero/checkpoint/together.h>
#include <zero/sharding/optimizer_state.h>

namespace zero::checkpoint {
namespace {

std::vector<int64_t> order_of(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense()
      ? memory_order(tensor.sizes().vec(), tensor.strides().vec())
      : std::vector<int64_t>();
}

Manifest agreed_manifest(const std::string& directory, Engine* engine) {
  settle_background_save(engine);
  const Together ranks(engine, "loading '" + directory + "'");
  Manifest manifest;
  const std::vector<std::string> generations = ranks.run([&] {
    manifest = read_manifest(directory);
    return manifest.generation;
  });
  ranks.run([&] {
    TORCH_CHECK_VALUE(
        manifest.generation == generations[0],
        "[zero.checkpoint] expected the same checkpoint in '",
        directory,
        "' on all ranks, got generation ",
        generations[0],
        " on rank 0 and ",
        manifest.generation,
        " on rank ",
        ranks.rank(),
        "; ranks need a file system that they share, and nobody may save there meanwhile");
    return std::string();
  });
  return manifest;
}

} // namespace

Checkpoint::Checkpoint(std::string directory, Engine* engine)
    : directory_(std::move(directory)),
      manifest_(agreed_manifest(directory_, engine)),
      files_(directory_, manifest_, Check::none) { // verify() compares
  for (const ManifestTensor& tensor : manifest_.tensors) {
    tensors_.emplace(tensor.name, &tensor);
    if (tensor.kind == TensorKind::state) {
      auto [owner, state] = split_state_name(tensor.name);
      if (state != kAverage) {
        states_[owner].push_back(std::move(state));
      }
    }
  }
  for (auto& [owner, states] : states_) {
    std::sort(states.begin(), states.end());
  }
}

const ManifestTensor* Checkpoint::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : found->second;
}

std::vector<std::string> Checkpoint::state_of(const std::string& parameter) const {
  const auto found = states_.find(parameter);
  return found == states_.end() ? std::vector<std::string>() : found->second;
}

void Checkpoint::verify(Engine* engine, bool state) {
  const Together ranks(engine, "loading '" + directory_ + "'");
  ranks.run([&] {
    int64_t at = 0;
    for (const ManifestTensor& tensor : manifest_.tensors) {
      if ((tensor.kind == TensorKind::state) != state) {
        continue;
      }
      for (const Piece& piece : tensor.pieces) {
        if (at++ % ranks.size() == ranks.rank()) {
          files_.verify(tensor, piece);
        }
      }
    }
    return std::string();
  });
}

void Checkpoint::verify_state(Engine* engine) {
  verify(engine, /*state=*/true);
}

void Checkpoint::fill(const Target& target) {
  const layout::Range wanted{target.begin, target.begin + target.values.numel()};
  if (wanted.size() == 0) {
    return;
  }
  if (target.values.scalar_type() == target.tensor->dtype && target.values.is_contiguous() &&
      target.values.is_cpu()) {
    files_.read(*target.tensor, wanted, target.order, target.values.mutable_data_ptr());
    return;
  }
  const at::Tensor buffer = at::empty({wanted.size()}, target.tensor->dtype);
  files_.read(*target.tensor, wanted, target.order, buffer.mutable_data_ptr());
  at::Tensor(target.values).copy_(buffer);
}

void Checkpoint::fill_loose(const LooseTensor& loose) {
  const ManifestTensor* tensor = find(loose.name);
  if (tensor == nullptr) {
    return;
  }
  at::Tensor destination = loose.tensor.detach();
  const at::Tensor whole = at::empty({destination.numel()}, tensor->dtype);
  fill({tensor, {}, 0, whole});
  destination.copy_(whole.view(destination.sizes())); // counts as a change
}

Shapes Checkpoint::shapes() const {
  Shapes shapes;
  for (const ManifestTensor& tensor : manifest_.tensors) {
    if (tensor.kind != TensorKind::state) {
      shapes[tensor.name] = tensor.shape;
    }
  }
  return shapes;
}

LoadResult Checkpoint::load_model(const Contents& contents, const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  Engine* engine = contents.engine.get();
  const Together ranks(engine, "loading '" + directory_ + "'");
  LoadResult result;
  ranks.run([&] {
    result = match(shapes_of(contents), shapes(), directory_, options.strict);
    return std::string();
  });
  if (options.verify) {
    verify(engine, /*state=*/false);
  }
  fill_together(engine, ranks, [&](const std::vector<StoredPart>& parts) {
    for (const StoredPart& part : parts) {
      const NamedParameter& parameter = engine->parameter(part.index);
      if (const ManifestTensor* tensor = find(parameter.name)) {
        fill({tensor, order_of(parameter.tensor), part.begin, part.values});
      }
    }
    for (const LooseTensor& loose : contents.loose) {
      fill_loose(loose);
    }
  });
  return result;
}

void Checkpoint::require_state(const Rule& rule, const std::vector<std::string>& parameters) const {
  std::vector<std::string> allowed = sharding::state_names(rule);
  allowed.emplace_back("max_exp_avg_sq"); // stays when amsgrad is switched off
  require_state(allowed, "the optimizer's rule", parameters);
}

void Checkpoint::require_state(
    const std::vector<std::string>& allowed,
    const std::string& owner,
    const std::vector<std::string>& parameters) const {
  for (const std::string& parameter : parameters) {
    for (const std::string& state : state_of(parameter)) {
      TORCH_CHECK_VALUE(
          std::find(allowed.begin(), allowed.end(), state) != allowed.end(),
          "[zero.checkpoint] expected state of parameter '",
          parameter,
          "' in '",
          directory_,
          "' to be of ",
          owner,
          ", got ",
          state);
    }
  }
}

void Checkpoint::load_native_state(
    Engine& engine,
    const std::map<std::string, int64_t>& steps,
    bool verify) {
  const at::NoGradGuard no_grad;
  if (verify) {
    verify_state(&engine);
  }
  const Together ranks(&engine, "loading '" + directory_ + "'");
  ranks.run([&] {
    for (int64_t i = 0; i < engine.parameter_count(); ++i) {
      const NamedParameter& parameter = engine.parameter(i);
      const auto found = steps.find(parameter.name);
      const int64_t count = found == steps.end() ? 0 : found->second;
      const std::vector<std::string> names =
          count > 0 ? state_of(parameter.name) : std::vector<std::string>();
      for (const StoredPart& part : engine.load_state(i, names, count)) {
        const ManifestTensor* tensor = find(state_name(parameter.name, part.state));
        if (tensor != nullptr) {
          fill({tensor, order_of(parameter.tensor), part.begin, part.values});
        } else {
          at::Tensor(part.values).zero_();
        }
      }
    }
    return std::string();
  });
}

at::Tensor Checkpoint::read_state(Engine& engine, int64_t index, const std::string& state) {
  const at::NoGradGuard no_grad;
  const NamedParameter& parameter = engine.parameter(index);
  const ManifestTensor* tensor = find(state_name(parameter.name, state));
  TORCH_CHECK_VALUE(
      tensor != nullptr && tensor->shape == parameter.tensor.sizes().vec(),
      "[zero.checkpoint] expected state '",
      state,
      "' of parameter '",
      parameter.name,
      "' in '",
      directory_,
      "' with the parameter's shape, got ",
      tensor == nullptr ? std::string("none") : c10::str(at::IntArrayRef(tensor->shape)));
  const at::Tensor values = at::empty({engine.shard_parameter(index).numel()}, tensor->dtype);
  fill({tensor, order_of(parameter.tensor), engine.held_begin(index), values});
  return values;
}

} // namespace zero::checkpoint
