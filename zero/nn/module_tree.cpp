#include <zero/nn/module_tree.h>

#include <algorithm>
#include <typeinfo>
#include <unordered_set>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

namespace zero::nn {
namespace {

using layout::ModuleSpec;
using torch::nn::Module;
using IndexOf = std::unordered_map<const c10::TensorImpl*, int64_t>;

template <typename T>
bool is(const Module& module) {
  return dynamic_cast<const T*>(&module) != nullptr;
}

class Reader {
 public:
  explicit Reader(const IndexOf& index_of_parameter) : index_of_parameter_(index_of_parameter) {}

  void read(const Module& module, const std::string& name, int64_t parent) {
    if (!seen_.insert(&module).second) {
      return;
    }
    const auto index = static_cast<int64_t>(specs.size());
    specs.push_back(spec_of(module, name, parent));
    for (const auto& child : module.named_children()) {
      read(*child.value(), name.empty() ? child.key() : name + "." + child.key(), index);
    }
  }

  std::vector<ModuleSpec> specs;

 private:
  ModuleSpec spec_of(const Module& module, const std::string& name, int64_t parent) const {
    const bool without_forward =
        is<torch::nn::ModuleListImpl>(module) || is<torch::nn::ModuleDictImpl>(module);
    ModuleSpec spec{.name = name, .parent = parent, .type = c10::demangle(typeid(module).name())};
    spec.list = without_forward || is<torch::nn::SequentialImpl>(module);
    spec.called = !without_forward;
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const auto found = index_of_parameter_.find(item.value().unsafeGetTensorImpl());
      if (found != index_of_parameter_.end()) {
        spec.parameters.push_back(found->second);
      }
    }
    return spec;
  }

  const IndexOf& index_of_parameter_;
  std::unordered_set<const Module*> seen_;
};

// "torch::nn::LinearImpl" without its namespace; "::" in template arguments stays.
std::string unqualified(const std::string& type) {
  const size_t colons = type.rfind("::", type.find('<'));
  return colons == std::string::npos ? type : type.substr(colons + 2);
}

bool picks(const std::string& chosen, const ModuleSpec& spec) {
  const std::string type = unqualified(spec.type);
  return chosen == spec.name || chosen == spec.type || chosen == type || chosen + "Impl" == type;
}

std::string some_names(const std::vector<ModuleSpec>& specs) {
  constexpr size_t shown = 6;
  std::string names;
  for (size_t i = 1; i < specs.size() && i <= shown; ++i) {
    names += (i > 1 ? ", '" : "'") + specs[i].name + "'";
  }
  return specs.size() > shown + 1 ? names + " ..." : names;
}

} // namespace

std::unordered_set<const c10::TensorImpl*> parameters_of_batch_norms(const Module& module) {
  std::unordered_set<const c10::TensorImpl*> parameters;
  const auto add = [&](const Module& part) {
    if (c10::demangle(typeid(part).name()).find("BatchNorm") != std::string::npos) {
      for (const at::Tensor& parameter : part.parameters(/*recurse=*/false)) {
        parameters.insert(parameter.unsafeGetTensorImpl());
      }
    }
  };
  add(module);
  for (const auto& part : module.modules(/*include_self=*/false)) { // self may be on the stack
    add(*part);
  }
  return parameters;
}

std::vector<ModuleSpec> read_modules(
    const Module& module,
    const IndexOf& index_of_parameter,
    const std::vector<std::string>& chosen_names) {
  Reader reader(index_of_parameter);
  reader.read(module, "", -1);
  for (const std::string& chosen : chosen_names) {
    bool found = false;
    for (ModuleSpec& spec : reader.specs) {
      const bool picked = picks(chosen, spec);
      spec.chosen = spec.chosen || picked;
      found = found || picked;
    }
    TORCH_CHECK_VALUE(
        found,
        "[zero.nn] expected units to name modules or their classes, got '",
        chosen,
        "', which no module has; there are ",
        some_names(reader.specs));
  }
  return std::move(reader.specs);
}

} // namespace zero::nn
