#pragma once

// Hooks on a parameter's AccumulateGrad node: one before it adds a gradient to
// `.grad`, one after. They hold the engine weakly, and the node is kept alive by
// the handle, so neither keeps a model alive.

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

namespace zero::autograd {

// Called on the thread that runs backward.
class AccumulateListener {
 public:
  virtual ~AccumulateListener() = default;
  virtual void before_accumulate(int64_t index) = 0;
  virtual void after_accumulate(int64_t index) = 0;
};

// Removes its hooks when destroyed.
class AccumulateHooks {
 public:
  virtual ~AccumulateHooks() = default;
};

// Null for what can't have gradients. A parameter that is frozen may be unfrozen later.
std::unique_ptr<AccumulateHooks> hook_accumulation(
    const at::Tensor& parameter,
    int64_t index,
    const std::weak_ptr<AccumulateListener>& listener);

} // namespace zero::autograd
