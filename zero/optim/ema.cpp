#include <zero/optim/ema.h>

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_lerp.h>
#include <c10/core/InferenceMode.h>

#include <zero/memory/elements.h>
#include <zero/optim/zero_optimizer.h>

namespace zero {
namespace {

void check_decay(double decay) {
  TORCH_CHECK_VALUE(
      decay >= 0.0 && decay < 1.0, "[zero.optim] expected decay in [0, 1), got ", decay);
}

// In which averages are kept: small updates would be lost in 16 bits.
at::Tensor in_average_dtype(const at::Tensor& values) {
  return memory::has_16_bits(values.dtype()) ? values.to(at::kFloat) : values;
}

} // namespace

EMA::EMA(ZeroOptimizer& optimizer, double decay)
    : EMA(optimizer.engine().shared_from_this(), decay) {}

EMA::EMA(std::shared_ptr<Engine> engine, double decay) : engine_(std::move(engine)), decay_(decay) {
  check_decay(decay);
  for (int64_t i = 0; i < engine_->parameter_count(); ++i) {
    averaged(i);
  }
}

// Parameters may have come, or been unfrozen, since: they start at their present values.
at::Tensor& EMA::averaged(int64_t index) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal(false);
  if (index >= static_cast<int64_t>(averages_.size())) {
    averages_.resize(index + 1);
  }
  at::Tensor& average = averages_[index];
  const at::Tensor values = engine_->shard_parameter(index);
  if (!average.defined() || average.numel() != values.numel()) {
    average = in_average_dtype(values.detach()).clone();
  }
  return average;
}

void EMA::require_weights(const char* operation) const {
  TORCH_CHECK(
      !swapped_,
      "[zero.optim] expected the weights in the parameters in EMA's ",
      operation,
      ", got the averages (rank ",
      engine_->rank(),
      " of ",
      engine_->world_size(),
      "): leave swapped(), or call swap() again, first");
}

void EMA::update() {
  require_weights("update()");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !engine_->joining(),
      "[zero.optim] EMA::update() inside zero.join is not built: a rank whose data has ended "
      "would not update its part; update after the join, or average once an epoch");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> averages;
  std::vector<at::Tensor> values;
  for (int64_t i = 0; i < engine_->parameter_count(); ++i) {
    const at::Tensor& average = averaged(i);
    if (average.numel() > 0) {
      averages.push_back(average);
      values.push_back(in_average_dtype(engine_->shard_parameter(i).detach()));
    }
  }
  if (!averages.empty()) {
    at::_foreach_lerp_(averages, values, 1.0 - decay_);
  }
  ++updates_;
}

void EMA::swap() {
  if (!swapped_) {
    for (int64_t i = 0; i < engine_->parameter_count(); ++i) {
      averaged(i);
    }
    held_ = averages_;
  }
  engine_->swap_values(held_, !swapped_);
  swapped_ = !swapped_;
  if (!swapped_) {
    held_.clear();
  }
}

void EMA::swapped(const std::function<void()>& body) {
  require_weights("swapped()");
  swap();
  try {
    body();
  } catch (...) {
    swap();
    throw;
  }
  swap();
}

at::Tensor EMA::average(int64_t index) {
  require_weights("average()");
  const at::NoGradGuard no_grad;
  const at::Tensor& own = averaged(index);
  return engine_->is_trainable(index) ? engine_->unshard(index, own)
                                      : engine_->full_parameter(index);
}

at::Tensor EMA::average(const at::Tensor& parameter) {
  const int64_t index = engine_->index_of(parameter);
  TORCH_CHECK_VALUE(
      index >= 0, "[zero.optim] expected a parameter that the optimizer manages, got another one");
  return average(index);
}

void EMA::load(int64_t index, const at::Tensor& whole) {
  require_weights("load()");
  const at::NoGradGuard no_grad;
  at::Tensor& own = averaged(index);
  const at::Tensor part = engine_->shard(index, whole); // also checks the shape
  if (own.numel() > 0) {
    own.copy_(part);
  }
}

void EMA::set_decay(double decay) {
  check_decay(decay);
  decay_ = decay;
}

int64_t EMA::bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& average : averages_) {
    bytes += static_cast<int64_t>(average.nbytes());
  }
  return bytes;
}

} // namespace zero
