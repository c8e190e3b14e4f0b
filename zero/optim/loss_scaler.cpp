#include <zero/optim/loss_scaler.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>

#include <zero/optim/zero_optimizer.h>

namespace zero {
namespace {

double rounded(double scale) {
  return static_cast<double>(static_cast<float>(scale));
}

double checked_scale(const char* name, double scale) {
  TORCH_CHECK_VALUE(
      scale > 0.0 && std::isfinite(rounded(scale)),
      "[zero.optim] expected ",
      name,
      " > 0 and finite in fp32, got ",
      scale);
  return rounded(scale);
}

LossScalerOptions checked(LossScalerOptions options) {
  TORCH_CHECK_VALUE(
      options.growth_factor > 1.0 && std::isfinite(options.growth_factor),
      "[zero.optim] expected a finite growth_factor > 1, got ",
      options.growth_factor);
  TORCH_CHECK_VALUE(
      options.backoff_factor > 0.0 && options.backoff_factor < 1.0,
      "[zero.optim] expected backoff_factor in (0, 1), got ",
      options.backoff_factor);
  TORCH_CHECK_VALUE(
      options.growth_interval >= 1,
      "[zero.optim] expected growth_interval >= 1, got ",
      options.growth_interval);
  return options;
}

} // namespace

LossScaler::LossScaler(const LossScalerOptions& options)
    : options_(checked(options)), scale_(checked_scale("init_scale", options.init_scale)) {}

at::Tensor LossScaler::scale(const at::Tensor& loss) const {
  if (!options_.enabled) {
    return loss;
  }
  if (!loss.is_cpu()) {
    return loss * on(loss.device()).scale;
  }
  return loss * at::scalar_tensor(scale_, at::TensorOptions(at::kFloat));
}

LossScaler::OnDevice& LossScaler::on(c10::Device device) const {
  if (!device_) {
    const auto options = at::TensorOptions(at::kFloat).device(device);
    device_ = OnDevice{
        at::full({}, scale_, options),
        at::full({}, growth_tracker_, options.dtype(at::kInt)),
        at::Tensor()};
  }
  return *device_;
}

GradNorm LossScaler::unscale_on_device(
    ZeroOptimizer& optimizer,
    double norm_type,
    std::optional<double> max) {
  Engine& engine = optimizer.engine();
  const at::NoGradGuard no_grad;
  OnDevice& own = on(engine.device());
  Engine::OnDevice unscaled = engine.unscale_on_device(
      own.scale.to(at::kDouble).reciprocal().to(at::kFloat), norm_type, max);
  const at::Tensor found = unscaled.found_nonfinite.reshape({});
  own.found_nonfinite =
      own.found_nonfinite.defined() ? at::maximum(own.found_nonfinite, found) : found;
  engine.leave_out_where(found);
  return unscaled.norm;
}

bool LossScaler::step_on_device(ZeroOptimizer& optimizer) {
  const bool stepped = optimizer.step();
  progress_[&optimizer.engine()].stage = Stage::stepped;
  return stepped;
}

double LossScaler::inverse() const {
  return rounded(1.0 / scale_);
}

LossScaler::Progress& LossScaler::begin_unscale(ZeroOptimizer& optimizer) {
  Progress& progress = progress_[&optimizer.engine()];
  TORCH_CHECK(
      progress.stage == Stage::ready,
      "[zero.optim] expected gradients to be unscaled once between two updates and before "
      "step(), got a second unscale_() or one after step(); call update() at the end of each "
      "iteration");
  return progress;
}

void LossScaler::unscale_(ZeroOptimizer& optimizer) {
  if (!options_.enabled) {
    return;
  }
  Progress& progress = begin_unscale(optimizer);
  if (!optimizer.engine().device().is_cpu()) {
    unscale_on_device(optimizer, std::numeric_limits<double>::infinity(), {});
  } else {
    progress.nonfinite = optimizer.engine().unscale(inverse());
  }
  progress.stage = Stage::unscaled;
}

GradNorm
LossScaler::unscale_and_clip_(ZeroOptimizer& optimizer, double max_norm, double norm_type) {
  if (!options_.enabled) {
    return optimizer.clip_grad_norm_(max_norm, norm_type);
  }
  Progress& progress = begin_unscale(optimizer);
  if (!optimizer.engine().device().is_cpu()) {
    GradNorm norm = unscale_on_device(optimizer, norm_type, max_norm);
    progress.stage = Stage::unscaled;
    return norm;
  }
  const Engine::Clipped clipped =
      optimizer.engine().unscale_and_clip(inverse(), max_norm, norm_type);
  progress.nonfinite = clipped.nonfinite;
  progress.stage = Stage::unscaled;
  return GradNorm(at::scalar_tensor(clipped.norm, at::kDouble));
}

bool LossScaler::step(ZeroOptimizer& optimizer) {
  if (!options_.enabled) {
    return optimizer.step();
  }
  TORCH_CHECK(
      progress_[&optimizer.engine()].stage != Stage::stepped,
      "[zero.optim] expected one step() of an optimizer between two updates, got a second; call "
      "update() at the end of each iteration");
  if (progress_[&optimizer.engine()].stage == Stage::ready) {
    unscale_(optimizer);
  }
  if (!optimizer.engine().device().is_cpu()) {
    return step_on_device(optimizer);
  }
  Progress& progress = progress_[&optimizer.engine()];
  bool stepped = false;
  if (progress.nonfinite < 0) {
    stepped = optimizer.step();
  } else {
    optimizer.engine().count_nonfinite(progress.nonfinite);
  }
  progress.stage = Stage::stepped;
  return stepped;
}

void LossScaler::update() {
  if (!options_.enabled) {
    return;
  }
  TORCH_CHECK(
      std::any_of(
          progress_.begin(),
          progress_.end(),
          [](const auto& item) { return item.second.stage != Stage::ready; }),
      "[zero.optim] expected unscale_() or step() before update(), got neither since the last one");
  if (device_ && device_->found_nonfinite.defined()) {
    const at::NoGradGuard no_grad;
    at::_amp_update_scale_(
        device_->scale,
        device_->growth_tracker,
        device_->found_nonfinite,
        options_.growth_factor,
        options_.backoff_factor,
        options_.growth_interval);
    device_->found_nonfinite.reset();
    progress_.clear();
    return;
  }
  const bool found = std::any_of(progress_.begin(), progress_.end(), [](const auto& item) {
    return item.second.nonfinite >= 0;
  });
  progress_.clear();
  if (found) {
    scale_ = rounded(scale_ * options_.backoff_factor);
    growth_tracker_ = 0;
  } else if (++growth_tracker_ >= options_.growth_interval) {
    const double grown = rounded(scale_ * options_.growth_factor);
    scale_ = std::isfinite(grown) ? grown : scale_;
    growth_tracker_ = 0;
  }
}

void LossScaler::update(double new_scale) {
  if (options_.enabled) {
    growth_tracker_ = state().growth_tracker;
    scale_ = checked_scale("new_scale", new_scale);
    device_.reset();
    progress_.clear();
  }
}

double LossScaler::get_scale() const {
  return options_.enabled ? state().scale : 1.0;
}

LossScaler::State LossScaler::state() const {
  if (device_) {
    return {device_->scale.item<double>(), device_->growth_tracker.item<int64_t>()};
  }
  return {scale_, growth_tracker_};
}

void LossScaler::load_state(const State& state) {
  TORCH_CHECK_VALUE(
      state.growth_tracker >= 0,
      "[zero.optim] expected growth_tracker >= 0, got ",
      state.growth_tracker);
  scale_ = checked_scale("scale", state.scale);
  growth_tracker_ = state.growth_tracker;
  device_.reset();
}

} // namespace zero
