#include <zero/sharding/dtype_names.h>

#include <c10/util/Exception.h>

namespace zero::sharding {

c10::ScalarType dtype_named(const std::string& name) {
  if (name == "bfloat16") {
    return c10::ScalarType::BFloat16;
  }
  if (name == "float16") {
    return c10::ScalarType::Half;
  }
  TORCH_CHECK_VALUE(
      name == "float32", "[zero.options] expected float32, bfloat16 or float16, got ", name);
  return c10::ScalarType::Float;
}

} // namespace zero::sharding
