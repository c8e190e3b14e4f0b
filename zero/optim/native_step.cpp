#include <zero/optim/native_step.h>

#include <set>
#include <unordered_map>

#include <ATen/ops/empty.h>

#include <zero/memory/device_kernels.h>
#include <zero/memory/device_streams.h>
#include <zero/memory/kernel_type.h>
#include <zero/optim/runs.h>

namespace zero::optim {
namespace {

using memory::element;
using memory::kernel_type;

// What one kernel call works on.
struct Stretch {
  kernels::Type type; // of parameter and state
  void* parameter;
  kernels::Type gradient_type;
  const void* gradient;
  kernels::Copy copy; // of master weights
  const std::vector<memory::FlatBuffer>& state;
  size_t state_count; // of the rule; there may be more
  int64_t begin; // in the state
  int64_t count;
  int64_t step; // on the CPU
  const kernels::DeviceKernels* device; // null: the CPU
  kernels::StreamHandle stream;
  kernels::StepState on_device;

  void* state_at(size_t index) const {
    return index < state_count ? element(state[index].tensor(), begin) : nullptr;
  }
};

void apply_adam(const Stretch& stretch, const kernels::AdamArguments& arguments) {
  const kernels::AdamBuffers buffers{
      .param = stretch.parameter,
      .grad_type = stretch.gradient_type,
      .grad = stretch.gradient,
      .exp_avg = stretch.state_at(0),
      .exp_avg_sq = stretch.state_at(1),
      .max_exp_avg_sq = stretch.state_at(2),
      .copy = stretch.copy};
  if (stretch.device != nullptr) {
    stretch.device->adam(
        stretch.stream, stretch.type, buffers, stretch.count, arguments, stretch.on_device);
  } else {
    kernels::adam(stretch.type, buffers, stretch.count, arguments);
  }
}

template <typename AdamLike>
kernels::AdamArguments adam_arguments(const AdamLike& rule, bool decoupled, int64_t step) {
  return {
      .lr = rule.lr,
      .beta1 = rule.betas[0],
      .beta2 = rule.betas[1],
      .eps = rule.eps,
      .weight_decay = rule.weight_decay,
      .decoupled = decoupled,
      .step = step,
      .maximize = rule.maximize};
}

void apply(const Stretch& stretch, const AdamW& rule) {
  apply_adam(stretch, adam_arguments(rule, true, stretch.step));
}

void apply(const Stretch& stretch, const Adam& rule) {
  apply_adam(stretch, adam_arguments(rule, false, stretch.step));
}

void apply(const Stretch& stretch, const SGD& rule) {
  const kernels::SgdBuffers buffers{
      .param = stretch.parameter,
      .grad_type = stretch.gradient_type,
      .grad = stretch.gradient,
      .momentum_buffer = stretch.state_at(0),
      .copy = stretch.copy};
  const kernels::SgdArguments arguments{
      .lr = rule.lr,
      .momentum = rule.momentum,
      .dampening = rule.dampening,
      .weight_decay = rule.weight_decay,
      .nesterov = rule.nesterov,
      .first_step = stretch.step == 1,
      .maximize = rule.maximize};
  if (stretch.device != nullptr) {
    stretch.device->sgd(
        stretch.stream, stretch.type, buffers, stretch.count, arguments, stretch.on_device);
  } else {
    kernels::sgd(stretch.type, buffers, stretch.count, arguments);
  }
}

void apply(const Stretch& stretch, const Lion& rule) {
  const kernels::LionBuffers buffers{
      .param = stretch.parameter,
      .grad_type = stretch.gradient_type,
      .grad = stretch.gradient,
      .exp_avg = stretch.state_at(0),
      .copy = stretch.copy};
  const kernels::LionArguments arguments{
      .lr = rule.lr,
      .beta1 = rule.betas[0],
      .beta2 = rule.betas[1],
      .weight_decay = rule.weight_decay,
      .maximize = rule.maximize};
  if (stretch.device != nullptr) {
    stretch.device->lion(
        stretch.stream, stretch.type, buffers, stretch.count, arguments, stretch.on_device);
  } else {
    kernels::lion(stretch.type, buffers, stretch.count, arguments);
  }
}

template <typename T>
const T* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

// Kernels step fp32 by gradients of any dtype, and other dtypes by their own: what
// was accumulated of 16-bit gradients in fp32 is rounded for 16-bit parameters.
at::Tensor of_dtype(const at::Tensor& gradient, const at::Tensor& stepped) {
  if (stepped.scalar_type() == at::kFloat || stepped.scalar_type() == gradient.scalar_type()) {
    return gradient;
  }
  at::Tensor rounded = at::empty({gradient.numel()}, stepped.options());
  memory::convert_elements(rounded, 0, gradient, 0, gradient.numel());
  return rounded;
}

kernels::Copy copy_of(const sharding::Stepped& stepped, int64_t begin) {
  if (!stepped.rounded.defined()) {
    return {};
  }
  return {
      kernel_type(stepped.rounded.scalar_type()),
      element(stepped.rounded, begin - stepped.rounded_begin)};
}

// Counts the step of the parameters that have a gradient, and gives their runs: those
// of equal keys are stepped alike. A key is the step's number, on a device the place
// among the bucket's counts.
std::vector<Run> begin_step(
    sharding::ParameterTable& table,
    const sharding::BucketGradient& gradient,
    sharding::StepCounts& steps,
    int64_t bucket,
    c10::Device device,
    const at::Tensor& found_nonfinite) {
  const auto& parameters = table.bucket(bucket).layout.parameters;
  if (device.is_cpu()) {
    for (const int64_t parameter : parameters) {
      if (gradient.has(parameter)) {
        steps.count(parameter);
      }
    }
    return runs_of(table, bucket, gradient.range, [&](int64_t parameter) {
      return gradient.has(parameter) ? steps.get(parameter) : -1;
    });
  }
  const std::vector<int64_t> counts = steps.begin(bucket, gradient.has);
  auto* const numbers = steps.counts(bucket).mutable_data_ptr<int64_t>();
  std::unordered_map<int64_t, int64_t> count_of;
  std::set<int64_t> counted;
  for (size_t i = 0; i < counts.size(); ++i) {
    count_of[parameters[i]] = counts[i];
    if (counts[i] >= 0 && counted.insert(counts[i]).second) {
      memory::device_kernels(device.type())
          .begin_step(
              memory::current_handle(device),
              numbers + counts[i],
              1,
              data_or_null<float>(found_nonfinite),
              nullptr);
    }
  }
  return runs_of(
      table, bucket, gradient.range, [&](int64_t parameter) { return count_of.at(parameter); });
}

} // namespace

void native_step(
    sharding::ParameterTable& table,
    const sharding::BucketGradient& gradient,
    sharding::OptimizerStateManager& state,
    sharding::MasterWeights& masters,
    int64_t bucket,
    const Rule& rule,
    const at::Tensor& found_nonfinite) {
  const layout::Range held = gradient.range;
  const sharding::Stepped stepped = masters.begin_step(bucket);
  const c10::Device device = stepped.values.device();
  const auto runs = begin_step(table, gradient, state.steps(), bucket, device, found_nonfinite);
  // Also where nothing of this rank's is stepped: state exists on all ranks or none,
  // so that all take part when it is made whole.
  const std::vector<std::string>& names = sharding::state_names(rule);
  const auto& tensors =
      state.tensors(bucket, names, stepped.values.options().requires_grad(false), held.size());
  const at::Tensor reduced = of_dtype(gradient.reduced, stepped.values);
  const bool host = device.is_cpu();
  for (const Run& run : runs) {
    const int64_t begin = run.range.begin - held.begin;
    Stretch stretch{
        kernel_type(stepped.values.scalar_type()),
        element(stepped.values, run.range.begin - stepped.begin),
        kernel_type(reduced.scalar_type()),
        element(reduced, begin),
        copy_of(stepped, run.range.begin),
        tensors,
        names.size(),
        begin,
        run.range.size(),
        run.key,
        host ? nullptr : &memory::device_kernels(device.type()),
        host ? nullptr : memory::current_handle(device),
        {}};
    if (!host) {
      stretch.on_device = {
          state.steps().counts(bucket).const_data_ptr<int64_t>() + run.key,
          data_or_null<float>(found_nonfinite)};
    }
    std::visit([&](const auto& concrete) { apply(stretch, concrete); }, rule);
    masters.stepped(bucket, stepped, run.range);
  }
}

} // namespace zero::optim
