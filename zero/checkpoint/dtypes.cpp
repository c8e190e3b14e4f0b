#include <zero/checkpoint/dtypes.h>

#include <algorithm>
#include <limits>
#include <utility>

#include <c10/util/Exception.h>

namespace zero::checkpoint {

namespace {

using enum c10::ScalarType;

constexpr std::pair<c10::ScalarType, std::string_view> kNames[] = {
    {Double, "F64"},
    {Float, "F32"},
    {Half, "F16"},
    {BFloat16, "BF16"},
    {Float8_e5m2, "F8_E5M2"},
    {Float8_e4m3fn, "F8_E4M3"},
    {Float8_e8m0fnu, "F8_E8M0"},
    {ComplexFloat, "C64"},
    {Long, "I64"},
    {Int, "I32"},
    {Short, "I16"},
    {Char, "I8"},
    {UInt64, "U64"},
    {UInt32, "U32"},
    {UInt16, "U16"},
    {Byte, "U8"},
    {Bool, "BOOL"},
};

} // namespace

std::string_view dtype_name(c10::ScalarType dtype, const std::string& tensor) {
  for (const auto& [known, name] : kNames) {
    if (known == dtype) {
      return name;
    }
  }
  TORCH_CHECK_TYPE(
      false,
      "[zero.checkpoint] tensor '",
      tensor,
      "' is of ",
      dtype,
      ", which safetensors has no name for; keep it out of the checkpoint or convert it");
}

std::optional<c10::ScalarType> dtype_named(std::string_view name) {
  for (const auto& [dtype, known] : kNames) {
    if (known == name) {
      return dtype;
    }
  }
  return std::nullopt;
}

std::vector<c10::ScalarType> stored_dtypes() {
  std::vector<c10::ScalarType> dtypes;
  for (const auto& [dtype, name] : kNames) {
    dtypes.push_back(dtype);
  }
  return dtypes;
}

std::optional<int64_t> checked_numel(const std::vector<int64_t>& shape, int64_t itemsize) {
  if (std::any_of(shape.begin(), shape.end(), [](int64_t size) { return size < 0; })) {
    return std::nullopt;
  }
  // Sizes beside a zero count too: torch multiplies them for strides.
  int64_t product = itemsize;
  bool empty = false;
  for (const int64_t size : shape) {
    empty |= size == 0;
    if (size > 0 && product > std::numeric_limits<int64_t>::max() / size) {
      return std::nullopt;
    }
    product *= std::max<int64_t>(size, 1);
  }
  return empty ? 0 : product / itemsize;
}

} // namespace zero::checkpoint
