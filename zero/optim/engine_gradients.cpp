// Engine's gradients between backward and step: norms, clipping, unscaling, and
// what becomes of a step whose gradients are not finite.

#include <zero/optim/engine_join.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <zero/memory/device_kernels.h>
#include <zero/memory/device_streams.h>
#include <zero/optim/device_norm.h>
#include <zero/optim/nonfinite.h>

namespace zero {

using optim::JoinAction;

namespace {

// As torch.nn.utils.clip_grad_norm_ scales.
void clip_to(
    double max_norm,
    const GradNorm& norm,
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients) {
  if (!norm.tensor().is_cpu()) {
    optim::scale_gradients(
        table, gradients, 1.0, optim::device_clip_factor(norm.tensor(), max_norm));
    return;
  }
  const float coefficient = static_cast<float>(max_norm) / (static_cast<float>(norm) + 1e-6F);
  if (!(coefficient >= 1.0F)) { // NaN scales, as in torch
    optim::scale_gradients(table, gradients, coefficient);
  }
}

GradNorm on_host(double norm) {
  const memory::Quiet quiet;
  return GradNorm(at::scalar_tensor(norm, at::kDouble));
}

} // namespace

// [collective]
std::vector<GradNorm> Engine::Impl::norms(const optim::NormOptions& wanted) {
  std::vector<GradNorm> norms;
  if (device.is_cpu()) {
    for (const double norm :
         optim::gradient_norms(table, gradients, *communicator, wanted).values) {
      norms.push_back(on_host(norm));
    }
    return norms;
  }
  const at::Tensor values =
      optim::device_norms(table, gradients, *communicator, device, wanted).values;
  const memory::Quiet quiet;
  for (int64_t i = 0; i < values.numel(); ++i) {
    norms.emplace_back(values.select(0, i));
  }
  return norms;
}

std::string Engine::Impl::describe(const optim::Nonfinite& found) const {
  return "inf or NaN in the gradient of parameter '" + table.entry(found.parameter).parameter.name +
      "' (held by rank " + std::to_string(found.rank) + ", seen on rank " +
      std::to_string(communicator->rank()) + " of " + std::to_string(communicator->size()) + ")";
}

bool Engine::Impl::may_step(bool native) {
  // All but these have to know now; a scaler's infinity leaves a step out in any case.
  const bool on_device = native && steps_on_device();
  const bool asks = !on_device || options.on_nonfinite == "raise";
  if (asks && found_nonfinite.defined() && take_found().item<float>() != 0.0F) {
    return false;
  }
  if (options.on_nonfinite == "ignore") {
    return true;
  }
  if (on_device && options.on_nonfinite == "skip") {
    find_on_device();
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

GradNorm Engine::grad_norm(double norm_type) {
  impl_->require_gradients("grad_norm");
  impl_->settle({.action = JoinAction::norm, .arguments = {norm_type}});
  return impl_->norms({.p = norm_type}).front();
}

std::vector<GradNorm> Engine::grad_norms(double norm_type) {
  impl_->require_gradients("grad_norms");
  impl_->settle({.action = JoinAction::norms, .arguments = {norm_type}});
  return impl_->norms({.p = norm_type, .per_group = true});
}

GradNorm Engine::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  impl_->require_gradients("clip_grad_norm_");
  impl_->settle(
      {.action = JoinAction::clip_norm,
       .arguments = {max_norm, norm_type, error_if_nonfinite ? 1.0 : 0.0}});
  const GradNorm norm = impl_->norms({.p = norm_type}).front();
  if (error_if_nonfinite && !std::isfinite(norm)) {
    const optim::Nonfinite found =
        optim::find_nonfinite(impl_->table, impl_->gradients, *impl_->communicator);
    TORCH_CHECK(
        false,
        "[zero.optim] expected a finite gradient norm of order ",
        norm_type,
        " with error_if_nonfinite, got ",
        static_cast<double>(norm),
        ": ",
        found ? impl_->describe(found)
              : std::string("every gradient is finite, their norm overflows"),
        "; gradients were not scaled: leave this step out, or clip without error_if_nonfinite");
  }
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
  if (!impl_->device.is_cpu()) {
    return impl_->unscale_on_device(factor, std::numeric_limits<double>::infinity()).nonfinite;
  }
  return optim::scale_and_find_nonfinite(
             impl_->table, impl_->gradients, *impl_->communicator, factor)
      .parameter;
}

Engine::Clipped Engine::unscale_and_clip(double factor, double max_norm, double norm_type) {
  impl_->require_gradients("unscaling gradients (a loss scaler)");
  impl_->refuse_scaler();
  impl_->settle({.action = JoinAction::other, .text = "unscale_and_clip"});
  if (!impl_->device.is_cpu()) {
    const Clipped clipped = impl_->unscale_on_device(factor, norm_type);
    if (clipped.nonfinite < 0) {
      clip_to(max_norm, on_host(clipped.norm), impl_->table, impl_->gradients);
    }
    return clipped;
  }
  const optim::GradientNorms norms = optim::gradient_norms(
      impl_->table, impl_->gradients, *impl_->communicator, {.p = norm_type, .factor = factor});
  if (!norms.nonfinite) {
    clip_to(max_norm, on_host(norms.values.front()), impl_->table, impl_->gradients);
  }
  return {norms.values.front(), norms.nonfinite.parameter};
}

// Waits for the device.
Engine::Clipped Engine::Impl::unscale_on_device(double factor, double norm_type) {
  const optim::DeviceNorms norms = optim::device_norms(
      table, gradients, *communicator, device, {.p = norm_type, .factor = factor});
  const bool finite = norms.found_nonfinite.item<float>() == 0.0F;
  const auto found =
      finite ? optim::Nonfinite() : optim::find_nonfinite(table, gradients, *communicator);
  return {norms.values.item<double>(), found.parameter};
}

void Engine::Impl::find_on_device() {
  const optim::DeviceNorms largest = optim::device_norms(
      table, gradients, *communicator, device, {.p = std::numeric_limits<double>::infinity()});
  const memory::Quiet quiet;
  found_nonfinite = found_nonfinite.defined()
      ? at::maximum(found_nonfinite, largest.found_nonfinite)
      : largest.found_nonfinite;
}

at::Tensor Engine::Impl::take_found() {
  at::Tensor found = std::exchange(found_nonfinite, {});
  if (found.defined()) {
    const memory::Quiet quiet;
    if (!left_out.defined()) {
      left_out = at::zeros({1}, at::TensorOptions(at::kLong).device(device));
    }
    memory::device_kernels(device.type())
        .begin_step(
            memory::current_handle(device),
            nullptr,
            0,
            found.const_data_ptr<float>(),
            left_out.mutable_data_ptr<int64_t>());
  }
  return found;
}

Engine::OnDevice Engine::unscale_on_device(
    const at::Tensor& factor,
    double norm_type,
    std::optional<double> max_norm) {
  impl_->require_gradients("unscaling gradients (a loss scaler)");
  impl_->settle({.action = JoinAction::other, .text = "unscale"});
  const memory::Quiet quiet;
  const optim::DeviceNorms norms = optim::device_norms(
      impl_->table,
      impl_->gradients,
      *impl_->communicator,
      impl_->device,
      {.p = norm_type, .device_factor = factor.to(impl_->device, at::kDouble)});
  if (max_norm) {
    const at::Tensor finite = norms.found_nonfinite.eq(0.0);
    const at::Tensor clip = optim::device_clip_factor(norms.values, *max_norm);
    optim::scale_gradients(
        impl_->table, impl_->gradients, 1.0, at::where(finite, clip, at::ones_like(clip)));
  }
  return {GradNorm(norms.values.select(0, 0)), norms.found_nonfinite};
}

c10::Device Engine::device() const {
  return impl_->device;
}

void Engine::scale_gradients(const at::Tensor& factor) {
  impl_->require_gradients("unscaling gradients (a loss scaler)");
  impl_->settle({.action = JoinAction::other, .text = "unscale"});
  const memory::Quiet quiet;
  optim::scale_gradients(
      impl_->table, impl_->gradients, 1.0, factor.to(impl_->device, at::kDouble));
}

void Engine::agree_nonfinite(const at::Tensor& found) {
  const memory::Quiet quiet;
  impl_->recover_if_failed();
  const int64_t ranks = world_size();
  const at::Tensor all = at::zeros({ranks}, found.options());
  memory::copy_elements(all, rank(), found, 0, 1);
  const auto work = impl_->communicator->all_reduce(
      all, {}, {"the check for non-finite gradients", 0, impl_->gradients.steps(), false});
  work->wait();
  memory::copy_elements(found, 0, all.amax().reshape({1}), 0, 1);
}

void Engine::leave_out_where(const at::Tensor& found) {
  const memory::Quiet quiet;
  impl_->found_nonfinite = found.reshape({1}).to(impl_->device, at::kFloat);
}

void Engine::count_nonfinite(int64_t parameter) {
  impl_->checked(parameter);
  impl_->count_nonfinite(parameter);
}

} // namespace zero
