#pragma once

// The loss scale of training in fp16, by the rule of torch.amp.GradScaler:
//   zero::LossScaler scaler;
//   scaler.scale(loss).backward();
//   scaler.unscale_and_clip_(optimizer, 1.0); // or unscale_(), or nothing
//   scaler.step(optimizer); // left out on all ranks when a gradient is inf or NaN
//   scaler.update();
// All ranks see the same gradients and so keep the same scale. With parameters on a
// device the scale is there, and nothing waits for the device but what asks for a number.

#include <cstdint>
#include <optional>
#include <unordered_map>

#include <ATen/core/Tensor.h>

#include <zero/api.h>
#include <zero/optim/grad_norm.h>

namespace zero {

class Engine;
class ZeroOptimizer;

// Defaults are torch.amp.GradScaler's.
struct LossScalerOptions {
  double init_scale = 65536.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  // Updates in a row without a non-finite gradient, after which the scale grows.
  int64_t growth_interval = 2000;
  // False: losses and gradients are left alone, and step() is the optimizer's.
  bool enabled = true;
};

class ZERO_API LossScaler {
 public:
  // Throws c10::ValueError naming the option and its range.
  explicit LossScaler(const LossScalerOptions& options = {});

  // The loss times the scale; fp32 of a 0-dim fp16 loss, which would overflow.
  at::Tensor scale(const at::Tensor& loss) const;
  // [collective] Divides the optimizer's gradients by the scale, once between two
  // updates, when they are complete.
  void unscale_(ZeroOptimizer& optimizer);
  // [collective] unscale_() and then clip_grad_norm_(), with one pass over the
  // gradients fewer, and one exchange. Returns the norm of the unscaled gradient;
  // where that is not finite gradients are not clipped.
  GradNorm unscale_and_clip_(ZeroOptimizer& optimizer, double max_norm, double norm_type = 2.0);
  // [collective] unscale_(), if that was not called, and the optimizer's step.
  // False: left out on all ranks; counted in the report as by on_nonfinite. On a device,
  // which alone knows, true also then.
  bool step(ZeroOptimizer& optimizer);
  // At the end of the iteration, after the steps of all optimizers: the scale falls
  // by backoff_factor if one was left out, and else grows when growth_interval is
  // reached.
  void update();
  // The same, with a scale of your own.
  void update(double new_scale);

  double get_scale() const; // 1 when not enabled
  const LossScalerOptions& options() const {
    return options_;
  }

  // What a checkpoint needs.
  struct State {
    double scale = 0.0;
    int64_t growth_tracker = 0;
  };
  State state() const;
  void load_state(const State& state);

 private:
  enum class Stage : uint8_t { ready, unscaled, stepped };
  struct Progress { // of one optimizer since the last update
    Stage stage = Stage::ready;
    int64_t nonfinite = -1; // parameter
  };
  Progress& begin_unscale(ZeroOptimizer& optimizer);
  double inverse() const;
  // Of a device, from the first use on.
  struct OnDevice {
    at::Tensor scale; // fp32, 0-dim
    at::Tensor growth_tracker; // int32, 0-dim
    at::Tensor found_nonfinite; // fp32, 0-dim; undefined before something was unscaled
  };
  OnDevice& on(c10::Device device) const;
  GradNorm unscale_on_device(ZeroOptimizer& optimizer, double norm_type, std::optional<double> max);
  bool step_on_device(ZeroOptimizer& optimizer);

  LossScalerOptions options_;
  double scale_; // a value of fp32, as GradScaler's
  int64_t growth_tracker_ = 0;
  std::unordered_map<const Engine*, Progress> progress_;
  mutable std::optional<OnDevice> device_;
};

} // namespace zero
