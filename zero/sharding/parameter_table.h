#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace zero {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  int64_t group = 0; // index of the parameter group
};

} // namespace zero
