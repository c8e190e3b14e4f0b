#include <zero/checkpoint/match.h>

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

namespace zero::checkpoint {
namespace {

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "'" : ", '") + name + "'";
  }
  return text.empty() ? "none" : text;
}

} // namespace

Shapes shapes_of(const Contents& contents) {
  Shapes shapes;
  for (int64_t i = 0; contents.engine && i < contents.engine->parameter_count(); ++i) {
    if (contents.engine->is_flat(i)) {
      const NamedParameter& parameter = contents.engine->parameter(i);
      shapes[parameter.name] = parameter.tensor.sizes().vec();
    }
  }
  for (const LooseTensor& loose : contents.loose) {
    shapes[loose.name] = loose.tensor.sizes().vec();
  }
  return shapes;
}

LoadResult match(const Shapes& wanted, const Shapes& found, const std::string& where, bool strict) {
  LoadResult result;
  std::string shapes;
  for (const auto& [name, shape] : wanted) {
    const auto other = found.find(name);
    if (other == found.end()) {
      result.missing.push_back(name);
    } else if (other->second != shape) {
      shapes += c10::str(
          shapes.empty() ? "" : ", ",
          "'",
          name,
          "' ",
          c10::IntArrayRef(other->second),
          " instead of ",
          c10::IntArrayRef(shape));
    }
  }
  for (const auto& [name, shape] : found) {
    if (!wanted.contains(name)) {
      result.unexpected.push_back(name);
    }
  }
  TORCH_CHECK_VALUE(
      shapes.empty() && (!strict || (result.missing.empty() && result.unexpected.empty())),
      "[zero.checkpoint] expected the parameters and buffers of this model in '",
      where,
      "', got missing: ",
      joined(result.missing),
      "; unexpected: ",
      joined(result.unexpected),
      "; other shapes: ",
      shapes.empty() ? "none" : shapes,
      strict ? " (strict=False leaves missing and unexpected ones alone)" : "");
  return result;
}

} // namespace zero::checkpoint
