#pragma once

// A torch::nn::Module's tree, as make_units() takes it.

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <zero/api.h>
#include <zero/layout/units.h>

namespace c10 {
struct TensorImpl;
} // namespace c10

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace zero::nn {

// The modules in preorder, each once: a shared one counts where it comes first.
// Parameters that are not in `index_of_parameter` are left out.
//
// `chosen_names` pick modules by full name ("blocks.3"), or by class, with or without
// its namespace and "Impl" ("Block"). Throws c10::ValueError on a name that picks none.
ZERO_API std::vector<layout::ModuleSpec> read_modules(
    const torch::nn::Module& module,
    const std::unordered_map<const c10::TensorImpl*, int64_t>& index_of_parameter,
    const std::vector<std::string>& chosen_names);

// Parameters of batch norms, which compute with statistics of fp32 and take inputs of
// 16 bits as they are: they keep their dtype in mixed precision.
std::unordered_set<const c10::TensorImpl*> parameters_of_batch_norms(
    const torch::nn::Module& module);

} // namespace zero::nn
