#include <zero/optim/native_step.h>

#include <zero/optim/kernel_type.h>
#include <zero/optim/runs.h>

namespace zero::optim {
namespace {

using memory::element;

// What one kernel call works on.
struct Stretch {
  kernels::Type type;
  void* parameter;
  const void* gradient;
  const std::vector<memory::FlatBuffer>& state;
  int64_t begin; // in the state
  int64_t count;
  int64_t step;
};

void apply_adam(const Stretch& stretch, const kernels::AdamArguments& arguments) {
  kernels::adam(
      stretch.type,
      stretch.parameter,
      stretch.gradient,
      element(stretch.state[0].tensor(), stretch.begin),
      element(stretch.state[1].tensor(), stretch.begin),
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
      .step = step};
}

void apply(const Stretch& stretch, const AdamW& rule) {
  apply_adam(stretch, adam_arguments(rule, true, stretch.step));
}

void apply(const Stretch& stretch, const Adam& rule) {
  apply_adam(stretch, adam_arguments(rule, false, stretch.step));
}

void apply(const Stretch& stretch, const SGD& rule) {
  void* buffer =
      stretch.state.empty() ? nullptr : element(stretch.state[0].tensor(), stretch.begin);
  kernels::sgd(
      stretch.type,
      stretch.parameter,
      stretch.gradient,
      buffer,
      stretch.count,
      {.lr = rule.lr,
       .momentum = rule.momentum,
       .dampening = rule.dampening,
       .weight_decay = rule.weight_decay,
       .nesterov = rule.nesterov,
       .first_step = stretch.step == 1});
}

} // namespace

void native_step(
    sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    sharding::OptimizerStateManager& state,
    int64_t bucket,
    const Rule& rule) {
  const layout::Range held = gradients.reduced_range(bucket);
  const auto steps = runs_of(table, bucket, held, [&](int64_t parameter) {
    return gradients.has_gradient(parameter) ? state.step_count(parameter) + 1 : -1;
  });
  for (const int64_t parameter : table.bucket(bucket).layout.parameters) {
    if (gradients.has_gradient(parameter)) {
      ++state.step_count(parameter);
    }
  }
  // Also where nothing of this rank's is stepped: state exists on all ranks or none,
  // so that all take part when it is made whole.
  const auto& tensors = state.tensors(bucket, sharding::state_names(rule), held.size());
  const at::Tensor& values = table.bucket(bucket).values.tensor();
  const int64_t first = table.bucket(bucket).held.begin;
  const at::Tensor reduced = gradients.reduced(bucket);
  const kernels::Type type = kernel_type(values.scalar_type());
  for (const Run& run : steps) {
    const int64_t begin = run.range.begin - held.begin;
    const Stretch stretch{
        type,
        element(values, run.range.begin - first),
        element(reduced, begin),
        tensors,
        begin,
        run.range.size(),
        run.key};
    std::visit([&](const auto& concrete) { apply(stretch, concrete); }, rule);
  }
}

} // namespace zero::optim
