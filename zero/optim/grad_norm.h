#pragma once

#include <utility>

#include <ATen/core/Tensor.h>

namespace zero {

// A gradient's norm. On a device it stays there until it is used as a number, which
// waits for the device.
class GradNorm {
 public:
  explicit GradNorm(at::Tensor value) : value_(std::move(value)) {}

  operator double() const { // NOLINT(google-explicit-constructor): it is one
    return value_.item<double>();
  }
  // fp64, 0-dim, where the gradients are; of a value of fp32, unless all gradients are fp64.
  const at::Tensor& tensor() const {
    return value_;
  }

 private:
  at::Tensor value_;
};

} // namespace zero
