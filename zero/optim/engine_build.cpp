// How an engine takes parameters in: compared, materialized, broadcast and laid out.

#include <zero/optim/engine_impl.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>

#include <zero/memory/device_kernels.h>
#include <zero/memory/heap.h>
#include <zero/sharding/agreement.h>

namespace zero {

void Engine::Impl::broadcast(const at::Tensor& tensor, int64_t root, const std::string& what) {
  const at::NoGradGuard no_grad;
  const at::Tensor dense = tensor.detach().contiguous();
  recover_if_failed();
  communicator->broadcast(dense, root, {what, 0, gradients.steps(), false})->wait();
  if (!dense.is_alias_of(tensor)) {
    tensor.detach().copy_(dense);
  }
}

// One communicator carries all of them, and one stream orders them. Parameters without
// storage come to lie where the others are.
void Engine::Impl::check_devices(const std::vector<NamedParameter>& added) {
  const auto counts = [this](const NamedParameter& parameter) {
    return !parameter.tensor.is_meta() && (parameters || parameter.tensor.requires_grad());
  };
  const auto first = std::find_if(added.begin(), added.end(), counts);
  if (first == added.end()) {
    return;
  }
  if (table.size() == 0) {
    device = first->tensor.device();
  }
  for (const NamedParameter& parameter : added) {
    TORCH_CHECK_VALUE(
        !counts(parameter) || parameter.tensor.device() == device,
        "[zero.optim] expected all parameters on one device, got '",
        parameter.name,
        "' on ",
        parameter.tensor.device(),
        table.size() == 0 ? " and '" + first->name + "' on " : std::string(" and others on "),
        device,
        " (rank ",
        communicator->rank(),
        " of ",
        communicator->size(),
        "); move the model to one device, or shard its parts by optimizers of their own");
  }
  check_offload(first->name);
  if (!device.is_cpu()) {
    memory::device_kernels(device.type()); // throws where there are none
  }
}

void Engine::Impl::check_offload(const std::string& name) const {
  TORCH_CHECK_VALUE(
      !options.offload || !device.is_cpu(),
      "[zero.optim] expected parameters on a device with offload=\"",
      options.offload.value_or(""),
      "\", got '",
      name,
      "' on the CPU, where there is nothing to offload (rank ",
      communicator->rank(),
      " of ",
      communicator->size(),
      "); leave offload out, or move the model to its device first");
}

void Engine::Impl::append(
    std::vector<NamedParameter> added,
    const std::vector<std::pair<std::string, at::Tensor>>& buffers,
    const Units& units) {
  table.check_new(added);
  check_devices(added);
  sharding::require_agreement(*communicator, added, buffers, options);
  const int64_t first = table.size();
  unit_names.insert(unit_names.end(), units.names.begin(), units.names.end());
  std::vector<std::vector<int64_t>> by_unit(parameters ? unit_names.size() : 1);
  std::vector<int64_t> frozen;
  for (const NamedParameter& parameter : added) {
    const int64_t index = first + static_cast<int64_t>(&parameter - added.data());
    if (parameters) {
      by_unit.at(parameter.unit).push_back(index);
    } else {
      (parameter.tensor.requires_grad() ? by_unit.front() : frozen).push_back(index);
    }
  }
  table.append(std::move(added));
  for (size_t position = 0; position < by_unit.size(); ++position) {
    const int64_t unit =
        position < units.order.size() ? units.order[position] : static_cast<int64_t>(position);
    if (units.materialize) {
      std::vector<at::Tensor> tensors = units.materialize(unit);
      for (size_t i = 0; i < tensors.size(); ++i) {
        device = tensors[i].device();
        check_offload(table.entry(by_unit[unit].at(i)).parameter.name);
        table.replace(by_unit[unit].at(i), std::move(tensors[i]));
      }
    }
    take_in(by_unit[unit]);
    if (units.materialize || position + 1 == by_unit.size()) {
      memory::return_free_memory();
    }
  }
  for (const int64_t index : frozen) {
    const NamedParameter& parameter = table.entry(index).parameter;
    broadcast(parameter.tensor, 0, "parameter '" + parameter.name + "'");
  }
  for (const auto& [name, tensor] : buffers) {
    broadcast(tensor, 0, "buffer '" + name + "'");
    if (options.sync_buffers) {
      own_buffers.emplace_back(name, tensor);
    }
  }
  gradients.grow();
  if (parameters) {
    parameters->grow(unit_names);
  }
  for (int64_t i = first; i < table.size(); ++i) {
    hooks.push_back(
        autograd::hook_accumulation(table.entry(i).parameter.tensor, i, weak_from_this()));
  }
}

void Engine::Impl::take_in(const std::vector<int64_t>& indices) {
  if (indices.empty()) {
    return;
  }
  const int64_t first = table.bucket_count();
  table.lay_out(indices);
  for (int64_t b = first; b < table.bucket_count(); ++b) {
    table.adopt(b);
    broadcast(table.bucket(b).values.tensor(), 0, table.bucket(b).what);
    const sharding::BucketEntry& bucket = table.bucket(b);
    const memory::FlatBuffer before = bucket.narrowed ? table.narrow(b) : memory::FlatBuffer();
    if (masters.wants(b)) {
      masters.keep(b, bucket.masters ? before.tensor() : bucket.values.tensor());
    }
    if (parameters) {
      table.shard_values(b);
      parameters->take_shard(b);
    }
  }
}

std::shared_ptr<Engine> Engine::create(
    std::vector<NamedParameter> parameters,
    std::vector<std::pair<std::string, at::Tensor>> buffers,
    const Options& options,
    std::shared_ptr<comm::Communicator> communicator,
    const Units& units) {
  options.validate();
  TORCH_CHECK_VALUE(!parameters.empty(), "[zero.optim] expected at least one parameter, got none");
  const c10::InferenceMode normal(false);
  auto impl = std::make_shared<Impl>(options, std::move(communicator), units);
  impl->append(std::move(parameters), buffers, units);
  return std::shared_ptr<Engine>(new Engine(std::move(impl)));
}

void Engine::add_parameters(
    std::vector<NamedParameter> parameters,
    std::vector<std::pair<std::string, at::Tensor>> buffers,
    std::vector<std::string> new_units) {
  const c10::InferenceMode normal(false);
  impl_->settle({.action = optim::JoinAction::other, .text = "add_param_group"});
  if (impl_->parameters) {
    impl_->parameters->before_step(); // a unit may grow
  }
  Units units;
  units.names = std::move(new_units);
  impl_->append(std::move(parameters), buffers, units);
}

} // namespace zero
