#pragma once

// An exponential moving average of the weights, sharded as they are stepped:
// average = decay * average + (1 - decay) * weights after each update() (Polyak and
// Juditsky, "Acceleration of Stochastic Approximation by Averaging", with constant
// weights). Each rank averages what it updates: its shard at stages 1 to 3,
// everything at stage 0.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/api.h>
#include <zero/optim/engine.h>

namespace zero {

class ZeroOptimizer;

class ZERO_API EMA {
 public:
  // Starts at the present weights (the fp32 masters, where there are any). Frozen
  // parameters are their own average. `decay` in [0, 1). Not collective.
  explicit EMA(ZeroOptimizer& optimizer, double decay = 0.999);
  explicit EMA(std::shared_ptr<Engine> engine, double decay = 0.999);
  ~EMA() = default;
  EMA(const EMA&) = delete;
  EMA& operator=(const EMA&) = delete;

  // Takes the present weights in; to be called after step(). Not collective. Throws
  // between swap() and the next.
  void update();

  // [collective] Runs `body` with the averages in the place of the weights, for
  // evaluation or saving; the weights are back afterwards, bit for bit, also when it
  // throws. step() throws inside.
  void swapped(const std::function<void()>& body);
  // [collective] The same by hand: exchanges averages and weights, at each call.
  void swap();
  bool is_swapped() const {
    return swapped_;
  }

  // [collective at stages 1 to 3] A whole average in the parameter's shape: of fp32
  // for 16-bit parameters, else of the parameter's dtype.
  at::Tensor average(int64_t index);
  at::Tensor average(const at::Tensor& parameter);
  // The average from a whole tensor, the same on all ranks. No communication.
  void load(int64_t index, const at::Tensor& whole);

  double decay() const {
    return decay_;
  }
  // From the next update() on.
  void set_decay(double decay);
  int64_t updates() const {
    return updates_;
  }
  void set_updates(int64_t updates) {
    updates_ = updates;
  }
  // What this rank keeps of an average, one-dimensional, of the elements of
  // Engine::shard_parameter(); empty without.
  at::Tensor part(int64_t index) {
    return averaged(index);
  }
  // Throws while the averages are in the parameters' place.
  void require_weights(const char* operation) const;
  Engine& engine() const {
    return *engine_;
  }
  // Bytes that the averages take on this rank.
  int64_t bytes() const;

 private:
  at::Tensor& averaged(int64_t index);

  const std::shared_ptr<Engine> engine_;
  double decay_;
  int64_t updates_ = 0;
  bool swapped_ = false;
  std::vector<at::Tensor> averages_; // by parameter: of this rank's part
  std::vector<at::Tensor> held_; // while swapped: what was in the parameters
};

} // namespace zero
