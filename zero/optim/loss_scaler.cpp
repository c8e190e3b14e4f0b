#include <zero/optim/loss_scaler.h>

#include <algorithm>
#include <cmath>

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
  return loss * at::scalar_tensor(scale_, at::TensorOptions(at::kFloat).device(loss.device()));
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
  progress.nonfinite = optimizer.engine().unscale(inverse());
  progress.stage = Stage::unscaled;
}

double LossScaler::unscale_and_clip_(ZeroOptimizer& optimizer, double max_norm, double norm_type) {
  if (!options_.enabled) {
    return optimizer.clip_grad_norm_(max_norm, norm_type);
  }
  Progress& progress = begin_unscale(optimizer);
  const Engine::Clipped clipped =
      optimizer.engine().unscale_and_clip(inverse(), max_norm, norm_type);
  progress.nonfinite = clipped.nonfinite;
  progress.stage = Stage::unscaled;
  return clipped.norm;
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
    scale_ = checked_scale("new_scale", new_scale);
    progress_.clear();
  }
}

double LossScaler::get_scale() const {
  return options_.enabled ? scale_ : 1.0;
}

LossScaler::State LossScaler::state() const {
  return {scale_, growth_tracker_};
}

void LossScaler::load_state(const State& state) {
  TORCH_CHECK_VALUE(
      state.growth_tracker >= 0,
      "[zero.optim] expected growth_tracker >= 0, got ",
      state.growth_tracker);
  scale_ = checked_scale("scale", state.scale);
  growth_tracker_ = state.growth_tracker;
}

} // namespace zero
