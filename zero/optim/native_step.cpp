#include <zero/optim/native_step.h>

#include <ATen/ops/empty.h>

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
  int64_t step;

  void* state_at(size_t index) const {
    return index < state_count ? element(state[index].tensor(), begin) : nullptr;
  }
};

void apply_adam(const Stretch& stretch, const kernels::AdamArguments& arguments) {
  kernels::adam(
      stretch.type,
      {.param = stretch.parameter,
       .grad_type = stretch.gradient_type,
       .grad = stretch.gradient,
       .exp_avg = stretch.state_at(0),
       .exp_avg_sq = stretch.state_at(1),
       .max_exp_avg_sq = stretch.state_at(2),
       .copy = stretch.copy},
      stretch.count,
      arguments);
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
  kernels::sgd(
      stretch.type,
      {.param = stretch.parameter,
       .grad_type = stretch.gradient_type,
       .grad = stretch.gradient,
       .momentum_buffer = stretch.state_at(0),
       .copy = stretch.copy},
      stretch.count,
      {.lr = rule.lr,
       .momentum = rule.momentum,
       .dampening = rule.dampening,
       .weight_decay = rule.weight_decay,
       .nesterov = rule.nesterov,
       .first_step = stretch.step == 1,
       .maximize = rule.maximize});
}

void apply(const Stretch& stretch, const Lion& rule) {
  kernels::lion(
      stretch.type,
      {.param = stretch.parameter,
       .grad_type = stretch.gradient_type,
       .grad = stretch.gradient,
       .exp_avg = stretch.state_at(0),
       .copy = stretch.copy},
      stretch.count,
      {.lr = rule.lr,
       .beta1 = rule.betas[0],
       .beta2 = rule.betas[1],
       .weight_decay = rule.weight_decay,
       .maximize = rule.maximize});
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

} // namespace

void native_step(
    sharding::ParameterTable& table,
    const sharding::BucketGradient& gradient,
    sharding::OptimizerStateManager& state,
    sharding::MasterWeights& masters,
    int64_t bucket,
    const Rule& rule) {
  const layout::Range held = gradient.range;
  const auto steps = runs_of(table, bucket, held, [&](int64_t parameter) {
    return gradient.has(parameter) ? state.step_count(parameter) + 1 : -1;
  });
  for (const int64_t parameter : table.bucket(bucket).layout.parameters) {
    if (gradient.has(parameter)) {
      ++state.step_count(parameter);
    }
  }
  const at::Tensor& values = table.bucket(bucket).values.tensor();
  const int64_t first = table.bucket(bucket).held.begin;
  const at::Tensor master = masters.tensor(bucket);
  const at::Tensor& stepped = master.defined() ? master : values;
  const int64_t stepped_begin = master.defined() ? held.begin : first;
  // Also where nothing of this rank's is stepped: state exists on all ranks or none,
  // so that all take part when it is made whole.
  const std::vector<std::string> names = sharding::state_names(rule);
  const auto& tensors =
      state.tensors(bucket, names, stepped.options().requires_grad(false), held.size());
  const at::Tensor reduced = of_dtype(gradient.reduced, stepped);
  for (const Run& run : steps) {
    const int64_t begin = run.range.begin - held.begin;
    const Stretch stretch{
        kernel_type(stepped.scalar_type()),
        element(stepped, run.range.begin - stepped_begin),
        kernel_type(reduced.scalar_type()),
        element(reduced, begin),
        master.defined()
            ? kernels::
                  Copy{kernel_type(values.scalar_type()), element(values, run.range.begin - first)}
            : kernels::Copy{},
        tensors,
        names.size(),
        begin,
        run.range.size(),
        run.key};
    std::visit([&](const auto& concrete) { apply(stretch, concrete); }, rule);
  }
}

} // namespace zero::optim
