// Engine's gradients between backward and step: norms, clipping, unscaling, and
// what becomes of a step whose gradients are not finite.

#include <zero/optim/engine_join.h>

#include <cmath>
#include <cstring>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <zero/optim/gradient_norm.h>
#include <zero/optim/nonfinite.h>

namespace zero {

using optim::JoinAction;

namespace {

// As torch.nn.utils.clip_grad_norm_ scales.
void clip_to(
    double max_norm,
    double norm,
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients) {
  const float coefficient = static_cast<float>(max_norm) / (static_cast<float>(norm) + 1e-6F);
  if (!(coefficient >= 1.0F)) { // NaN scales, as in torch
    optim::scale_gradients(table, gradients, coefficient);
  }
}

} // namespace

std::string Engine::Impl::describe(const optim::Nonfinite& found) const {
  return "inf or NaN in the gradient of parameter '" + table.entry(found.parameter).parameter.name +
      "' (held by rank " + std::to_string(found.rank) + ", seen on rank " +
      std::to_string(communicator->rank()) + " of " + std::to_string(communicator->size()) + ")";
}

bool Engine::Impl::may_step() {
  if (options.on_nonfinite == "ignore") {
    return true;
  }
  const optim::Nonfinite found = optim::find_nonfinite(table, gradients, *communicator);
  if (!found) {
    return true;
  }
  count_nonfinite(found.parameter);
  TORCH_CHECK(
      options.on_nonfinite == "skip",
      "[zero.optim] expected finite gradients in step() with on_nonfinite=\"raise\", got ",
      describe(found),
      "; nothing was changed: zero_grad() and go on, or choose on_nonfinite=\"skip\"");
  return false;
}

void Engine::Impl::count_nonfinite(int64_t parameter) {
  ++nonfinite_steps;
  nonfinite_parameter = parameter;
}

void Engine::zero_grad(bool set_to_none) {
  if (impl_->join) {
    impl_->join->zero_grad(set_to_none);
  }
  impl_->gradients.zero(set_to_none);
}

double Engine::grad_norm(double norm_type) {
  impl_->require_gradients("grad_norm");
  impl_->settle({.action = JoinAction::norm, .arguments = {norm_type}});
  return optim::gradient_norms(
             impl_->table, impl_->gradients, *impl_->communicator, {.p = norm_type})
      .values.front();
}

std::vector<double> Engine::grad_norms(double norm_type) {
  impl_->require_gradients("grad_norms");
  impl_->settle({.action = JoinAction::norms, .arguments = {norm_type}});
  return optim::gradient_norms(
             impl_->table,
             impl_->gradients,
             *impl_->communicator,
             {.p = norm_type, .per_group = true})
      .values;
}

double Engine::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  impl_->require_gradients("clip_grad_norm_");
  impl_->settle(
      {.action = JoinAction::clip_norm,
       .arguments = {max_norm, norm_type, error_if_nonfinite ? 1.0 : 0.0}});
  const optim::GradientNorms norms =
      optim::gradient_norms(impl_->table, impl_->gradients, *impl_->communicator, {.p = norm_type});
  const double norm = norms.values.front();
  TORCH_CHECK(
      !error_if_nonfinite || std::isfinite(norm),
      "[zero.optim] expected a finite gradient norm of order ",
      norm_type,
      " with error_if_nonfinite, got ",
      norm,
      ": ",
      norms.nonfinite ? impl_->describe(norms.nonfinite)
                      : std::string("every gradient is finite, their norm overflows"),
      "; gradients were not scaled: leave this step out, or clip without error_if_nonfinite");
  clip_to(max_norm, norm, impl_->table, impl_->gradients);
  return norm;
}

void Engine::clip_grad_value(double clip_value) {
  impl_->require_gradients("clip_grad_value_");
  TORCH_CHECK_VALUE(clip_value >= 0.0, "[zero.optim] expected clip_value >= 0, got ", clip_value);
  impl_->settle({.action = JoinAction::clip_value, .arguments = {clip_value}});
  optim::clamp_gradients(impl_->table, impl_->gradients, clip_value);
}

double Engine::divide_gradients(double divisor, bool across_ranks) {
  impl_->require_gradients("divide_grad_");
  impl_->settle(
      {.action = JoinAction::divide,
       .arguments = {across_ranks ? 0.0 : divisor, across_ranks ? 1.0 : 0.0}});
  if (across_ranks) {
    at::Tensor own = at::empty({static_cast<int64_t>(sizeof(double))}, at::kByte);
    std::memcpy(own.mutable_data_ptr(), &divisor, sizeof(double));
    divisor = 0.0;
    for (const at::Tensor& other : impl_->communicator->exchange(
             own, {"the divisor of gradients", 0, impl_->gradients.steps(), false})) {
      double theirs = 0.0;
      std::memcpy(&theirs, other.const_data_ptr(), sizeof(double));
      divisor += theirs;
    }
  }
  TORCH_CHECK_VALUE(
      std::isfinite(divisor) && divisor > 0.0,
      "[zero.optim] expected a finite divisor > 0 of the gradients, got ",
      divisor,
      across_ranks ? " as the sum over all ranks (rank " : " (rank ",
      rank(),
      " of ",
      world_size(),
      ")");
  const at::NoGradGuard no_grad;
  for (const int64_t index : stepping()) {
    shard_gradient(index).div_(divisor);
  }
  for (int64_t b = 0; b < impl_->table.bucket_count(); ++b) {
    impl_->gradients.reduced_changed(b);
  }
  return divisor;
}

int64_t Engine::unscale(double factor) {
  impl_->require_gradients("unscaling gradients (a loss scaler)");
  impl_->refuse_scaler();
  impl_->settle({.action = JoinAction::other, .text = "unscale"});
  return optim::scale_and_find_nonfinite(
             impl_->table, impl_->gradients, *impl_->communicator, factor)
      .parameter;
}

Engine::Clipped Engine::unscale_and_clip(double factor, double max_norm, double norm_type) {
  impl_->require_gradients("unscaling gradients (a loss scaler)");
  impl_->refuse_scaler();
  impl_->settle({.action = JoinAction::other, .text = "unscale_and_clip"});
  const optim::GradientNorms norms = optim::gradient_norms(
      impl_->table, impl_->gradients, *impl_->communicator, {.p = norm_type, .factor = factor});
  if (!norms.nonfinite) {
    clip_to(max_norm, norms.values.front(), impl_->table, impl_->gradients);
  }
  return {norms.values.front(), norms.nonfinite.parameter};
}

void Engine::count_nonfinite(int64_t parameter) {
  impl_->checked(parameter);
  impl_->count_nonfinite(parameter);
}

} // namespace zero
