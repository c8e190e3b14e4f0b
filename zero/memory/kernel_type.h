#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "csrc/kernels/kernels.h"

namespace zero::memory {

// The kernels' name of a dtype; a dtype that they don't have is a TypeError.
inline kernels::Type kernel_type(c10::ScalarType type) {
  switch (type) {
  case c10::ScalarType::Float:
    return kernels::Type::f32;
  case c10::ScalarType::Double:
    return kernels::Type::f64;
  case c10::ScalarType::BFloat16:
    return kernels::Type::bf16;
  case c10::ScalarType::Half:
    return kernels::Type::f16;
  default:
    TORCH_CHECK_TYPE(
        false,
        "[zero.memory] expected trainable parameters of float32, float64, bfloat16 or float16, "
        "got ",
        type);
  }
}

} // namespace zero::memory
