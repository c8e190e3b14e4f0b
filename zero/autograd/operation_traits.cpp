#include <zero/autograd/operation_traits.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <unordered_map>

#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

namespace zero::autograd {
namespace {

// Touch metadata only, whatever their schema says.
constexpr std::array<std::string_view, 19> kMetadata = {
    "aten::requires_grad_",
    "aten::retain_grad",
    "aten::detach_",
    "aten::set_data",
    "aten::rename_",
    "aten::as_strided_",
    "aten::squeeze_",
    "aten::unsqueeze_",
    "aten::t_",
    "aten::transpose_",
    "aten::swapaxes_",
    "aten::swapdims_",
    "aten::is_same_size",
    "aten::result_type",
    "aten::new_empty",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
    "aten::new_empty_strided"};

bool is_metadata(std::string_view name) {
  return name.ends_with("_like") ||
      std::find(kMetadata.begin(), kMetadata.end(), name) != kMetadata.end();
}

bool only_makes_views(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const auto& value) {
    return value.alias_info() != nullptr && !value.alias_info()->isWrite();
  });
}

OperationTraits examine(const at::RecordFunction& function) {
  OperationTraits traits;
  const std::optional<c10::FunctionSchema> schema = function.operator_schema();
  if (!schema) {
    // A custom autograd function, or torch's own note of a detach.
    traits.reads = std::string_view(function.name()) != "detach";
    return traits;
  }
  if (is_metadata(schema->name())) {
    traits.reads = false;
    return traits;
  }
  traits.reads = !only_makes_views(*schema);
  const auto& arguments = schema->arguments();
  for (size_t i = 0; i < arguments.size() && i < 64; ++i) {
    if (arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite()) {
      traits.writes |= uint64_t{1} << i;
    }
  }
  return traits;
}

struct Known {
  std::string name;
  OperationTraits traits;
};

} // namespace

OperationTraits traits_of(const at::RecordFunction& function) {
  // By the address of the name, which belongs to the operation's schema. Other
  // functions' names move about, so the name is compared too.
  thread_local std::unordered_map<const char*, Known> known;
  const char* name = function.name();
  const auto found = known.find(name);
  if (found != known.end() && found->second.name == name) {
    return found->second.traits;
  }
  const OperationTraits traits = examine(function);
  known.insert_or_assign(name, Known{name, traits});
  return traits;
}

} // namespace zero::autograd
