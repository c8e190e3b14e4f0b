#pragma once

// BucketStepper: what steps a bucket of parameters as soon as its gradient is reduced,
// inside backward. GradientManager calls it under its lock, on the thread of backward.

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

#include <zero/layout/flat_layout.h>

namespace zero::sharding {

// The reduced gradient of a bucket, as a rule needs it.
struct BucketGradient {
  at::Tensor reduced; // the elements `range` of the bucket
  layout::Range range;
  std::function<bool(int64_t parameter)> has; // whether the parameter has a gradient
};

class BucketStepper {
 public:
  virtual ~BucketStepper() = default;
  // A backward opens that is going to step: throws before anything is changed.
  virtual void begin() = 0;
  virtual void step(int64_t bucket, const BucketGradient& gradient) = 0;
  // [collective] Hands the stepped bucket to the other ranks.
  virtual void publish(int64_t bucket) = 0;
};

} // namespace zero::sharding
