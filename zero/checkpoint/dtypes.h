#pragma once

// The names that safetensors has for dtypes; the manifest uses them too.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

#include <zero/api.h>

namespace zero::checkpoint {

// "F32" of float32 and so on. A dtype without a name (complex128, quantized ones) is a
// c10::TypeError that names `tensor`.
ZERO_API std::string_view dtype_name(c10::ScalarType dtype, const std::string& tensor);
ZERO_API std::optional<c10::ScalarType> dtype_named(std::string_view name);
// All that have a name.
ZERO_API std::vector<c10::ScalarType> stored_dtypes();

// The product of a shape; nothing where a size is negative, or the elements of
// `itemsize` bytes are more than an int64_t counts.
ZERO_API std::optional<int64_t> checked_numel(const std::vector<int64_t>& shape, int64_t itemsize);

} // namespace zero::checkpoint
