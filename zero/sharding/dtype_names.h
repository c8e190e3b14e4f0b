#pragma once

#include <string>

#include <c10/core/ScalarType.h>

namespace zero::sharding {

// The dtype that Options call "float32", "bfloat16" or "float16"; other names are a
// ValueError.
c10::ScalarType dtype_named(const std::string& name);

} // namespace zero::sharding
