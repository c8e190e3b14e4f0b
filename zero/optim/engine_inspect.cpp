// Engine's whole tensors: what a user inspects, saves and loads.

#include <zero/optim/engine_impl.h>

#include <array>
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

namespace zero {
namespace {

// A whole tensor in a parameter's shape and strides.
at::Tensor whole_like(const at::Tensor& parameter, c10::ScalarType type) {
  return at::empty_strided(
      parameter.sizes(),
      parameter.strides(),
      at::TensorOptions().dtype(type).device(parameter.device()));
}

at::Tensor as_bytes(const at::Tensor& flat) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(flat.nbytes())}, at::kByte);
  if (flat.numel() > 0) {
    const at::Tensor local = flat.detach().to(at::kCPU).contiguous();
    std::memcpy(bytes.mutable_data_ptr(), local.const_data_ptr(), local.nbytes());
  }
  return bytes;
}

} // namespace

at::Tensor Engine::Impl::values(int64_t index, layout::Range part) const {
  const sharding::ParameterEntry& entry = table.entry(index);
  if (part.size() == 0) {
    const sharding::BucketEntry* bucket = entry.flat ? &table.bucket(entry.slot.bucket) : nullptr;
    return bucket != nullptr && bucket->values
        ? bucket->values.view(0, 0)
        : at::empty({0}, entry.parameter.tensor.options().requires_grad(false));
  }
  return table.values(entry.slot.bucket, entry.slot.offset + part.begin, part.size());
}

at::Tensor Engine::Impl::exact_values(int64_t index, layout::Range part) const {
  const sharding::ParameterEntry& entry = table.entry(index);
  if (!entry.flat || !masters.has(entry.slot.bucket)) {
    return values(index, part);
  }
  const int64_t first =
      part.size() > 0 ? entry.slot.offset + part.begin : masters.range(entry.slot.bucket).begin;
  return masters.view(entry.slot.bucket, {first, first + part.size()});
}

void Engine::Impl::refresh_master(int64_t index) {
  const sharding::ParameterEntry& entry = checked(index);
  if (entry.flat && masters.has(entry.slot.bucket)) {
    masters.refresh(entry.slot.bucket, entry.slot.range());
  }
}

std::vector<at::Tensor> Engine::Impl::parts(int64_t index, const at::Tensor& own, Part part) {
  static constexpr std::array<const char*, 4> kNames = {
      "the value", "the gradient", "optimizer state", "a tensor"};
  const auto kind = static_cast<size_t>(part);
  const sharding::ParameterEntry& entry = checked(index);
  const layout::Range range = owned(index);
  TORCH_CHECK_VALUE(
      !entry.flat || own.numel() == range.size(),
      "[zero.optim] expected ",
      range.size(),
      " elements, this rank's part of parameter '",
      entry.parameter.name,
      "', got ",
      own.numel(),
      " (rank ",
      communicator->rank(),
      " of ",
      communicator->size(),
      ")");
  recover_if_failed();
  announce(kNames.at(kind));
  return communicator->exchange_shards(
      as_bytes(own),
      {std::string(kNames.at(kind)) + " of parameter '" + entry.parameter.name + "'",
       static_cast<int64_t>(kNames.size()) * index + static_cast<int64_t>(kind),
       gradients.steps(),
       false});
}

at::Tensor Engine::Impl::unshard(int64_t index, const at::Tensor& own, Part part) {
  const at::NoGradGuard no_grad;
  const sharding::ParameterEntry& entry = checked(index);
  if (options.stage == 0) {
    at::Tensor whole = whole_like(entry.parameter.tensor, own.scalar_type());
    memory::copy_elements(whole, 0, own.contiguous(), 0, own.numel());
    return whole;
  }
  const std::vector<at::Tensor> pieces = parts(index, own, part);
  at::Tensor whole = whole_like(entry.parameter.tensor, own.scalar_type());
  int64_t at = 0;
  for (const at::Tensor& piece : pieces) {
    const int64_t numel = piece.numel() / static_cast<int64_t>(whole.itemsize());
    TORCH_CHECK(
        at + numel <= whole.numel(),
        "[zero.optim] ranks sent more than the ",
        whole.numel(),
        " elements of parameter '",
        entry.parameter.name,
        "': they hold different dtypes of it; give every rank the same");
    if (numel > 0) {
      memory::copy_elements(whole, at, piece.view(whole.scalar_type()), 0, numel);
    }
    at += numel;
  }
  return whole;
}

at::Tensor Engine::full_parameter(int64_t index) {
  impl_->settle({.action = optim::JoinAction::inspect, .text = "full_param"});
  impl_->refresh_master(index);
  const sharding::ParameterEntry& entry = impl_->checked(index);
  if (!impl_->parameters && !has_master(index)) {
    const at::NoGradGuard no_grad;
    return entry.parameter.tensor.detach().clone();
  }
  return impl_->unshard(index, impl_->exact_values(index, impl_->owned(index)), Impl::Part::value);
}

bool Engine::is_trainable(int64_t index) const {
  return impl_->checked(index).trainable;
}

bool Engine::has_master(int64_t index) const {
  const sharding::ParameterEntry& entry = impl_->checked(index);
  return entry.flat && impl_->table.bucket(entry.slot.bucket).masters;
}

void Engine::load_master(int64_t index, const at::Tensor& whole) {
  if (!has_master(index)) {
    return;
  }
  const at::NoGradGuard no_grad;
  const layout::Slot& slot = impl_->table.entry(index).slot;
  const layout::Range own = impl_->updated(index);
  const layout::Range elements{slot.offset + own.begin, slot.offset + own.end};
  if (own.size() > 0) {
    impl_->masters.view(slot.bucket, elements).copy_(shard(index, whole));
    impl_->masters.publish(slot.bucket, elements);
  }
}

void Engine::join_full_parameter(int64_t index) {
  impl_->settle({.action = optim::JoinAction::inspect, .text = "full_param"});
  impl_->refresh_master(index);
  if (impl_->parameters || (has_master(index) && impl_->options.stage > 0)) {
    impl_->parts(index, impl_->exact_values(index, impl_->owned(index)), Impl::Part::value);
  }
}

at::Tensor Engine::full_gradient(int64_t index) {
  impl_->checked(index);
  impl_->settle({.action = optim::JoinAction::inspect, .text = "full_grad"});
  return impl_->gradients.has_gradient(index)
      ? impl_->unshard(index, shard_gradient(index), Impl::Part::gradient)
      : at::Tensor();
}

at::Tensor Engine::unshard(int64_t index, const at::Tensor& shard) {
  return impl_->unshard(index, shard, Impl::Part::other);
}

at::Tensor Engine::shard(int64_t index, const at::Tensor& whole) {
  const sharding::ParameterEntry& entry = impl_->checked(index);
  const at::Tensor& parameter = entry.parameter.tensor;
  TORCH_CHECK_VALUE(
      whole.sizes() == parameter.sizes(),
      "[zero.optim] expected shape ",
      parameter.sizes(),
      " for parameter '",
      entry.parameter.name,
      "', got ",
      whole.sizes());
  const at::NoGradGuard no_grad;
  at::Tensor dense = whole_like(parameter, whole.scalar_type());
  dense.copy_(whole);
  const layout::Range part = impl_->updated(index);
  return memory::flat_view(dense, part.begin, part.size()).clone();
}

std::map<std::string, at::Tensor> Engine::full_state(int64_t index) {
  const sharding::ParameterEntry& entry = impl_->checked(index);
  std::map<std::string, at::Tensor> whole;
  const int64_t steps = entry.trainable ? impl_->state.steps().get(index) : 0;
  if (steps == 0) {
    return whole;
  }
  const layout::Range held = impl_->held(index);
  const std::vector<std::string>& names = impl_->state.names(entry.slot.bucket);
  for (size_t k = 0; k < names.size(); ++k) {
    const at::Tensor flat =
        impl_->state.existing(entry.slot.bucket)[k].view(held.begin, held.size());
    whole[names[k]] = impl_->unshard(index, flat, Impl::Part::state);
  }
  whole["step"] = at::full({}, static_cast<double>(steps), at::kFloat);
  return whole;
}

void Engine::make_trainable(const std::vector<int64_t>& indices) {
  impl_->announce("load_state_dict");
  const c10::InferenceMode normal(false);
  std::vector<bool> trainable(impl_->table.size());
  for (const int64_t index : indices) {
    impl_->checked(index);
    trainable[index] = true;
  }
  impl_->gradients.catch_up(trainable);
}

void Engine::load_full_state(int64_t index, const std::map<std::string, at::Tensor>& state) {
  const at::NoGradGuard no_grad;
  std::vector<std::string> names;
  int64_t steps = state.empty() ? 0 : 1;
  for (const auto& [name, tensor] : state) {
    if (name == "step") {
      steps = static_cast<int64_t>(tensor.to(at::kDouble).item<double>());
    } else {
      names.push_back(name);
    }
  }
  for (const StoredPart& part : load_state(index, names, steps)) {
    at::Tensor(part.values).copy_(shard(index, state.at(part.state)));
  }
}

void Engine::broadcast_parameters(const std::vector<int64_t>& indices, int64_t root) {
  impl_->settle({.action = optim::JoinAction::other, .text = "gathered(writeback=True)"});
  const std::vector<int64_t> units = impl_->units_of(indices);
  for (const int64_t unit : units) {
    TORCH_CHECK(
        impl_->parameters->whole(unit),
        "[zero.optim] expected unit ",
        impl_->parameters->name(unit),
        " to be held whole by zero.gathered(..., writeback=True) while its parameters are "
        "broadcast, got a sharded one");
  }
  for (const int64_t index : indices) {
    const NamedParameter& parameter = impl_->checked(index).parameter;
    impl_->broadcast(parameter.tensor, root, "parameter '" + parameter.name + "'");
    parameter.tensor.unsafeGetTensorImpl()->bump_version();
  }
  for (const int64_t unit : units) {
    impl_->parameters->store(unit);
  }
  for (const int64_t index : indices) {
    impl_->refresh_master(index);
  }
}

void Engine::broadcast(const std::vector<at::Tensor>& tensors, int64_t root) {
  impl_->announce("load_state_dict");
  for (const at::Tensor& tensor : tensors) {
    impl_->broadcast(tensor, root, "a tensor");
  }
}

std::vector<at::Tensor> Engine::exchange(const at::Tensor& bytes) {
  impl_->recover_if_failed();
  impl_->announce("state_dict");
  return impl_->communicator->exchange(
      bytes, {"a Python value", -1, impl_->gradients.steps(), false});
}

std::shared_ptr<comm::Communicator> Engine::duplicate_communicator() {
  impl_->announce("async_save");
  return impl_->communicator->duplicate();
}

bool Engine::agree_any(bool value) {
  bool any = false;
  const at::Tensor own = at::full({1}, value ? 1 : 0, at::kByte);
  for (const at::Tensor& other : exchange(own)) {
    any = any || *other.const_data_ptr<uint8_t>() != 0;
  }
  return any;
}

} // namespace zero
