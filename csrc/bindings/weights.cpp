// Whole weights: the core of zero_torch.consolidate, of zero_torch.load of other files,
// and of the commands.

#include "bindings.h"
#include "callbacks.h"
#include "contents.h"

#include <pybind11/functional.h>

#include <zero/checkpoint/checkpoint.h>
#include <zero/checkpoint/data_files.h>
#include <zero/checkpoint/directory.h>
#include <zero/checkpoint/weights.h>

namespace zero::bindings {
namespace {

namespace ckpt = zero::checkpoint;
using NoGil = py::call_guard<py::gil_scoped_release>;

std::pair<std::vector<std::string>, std::vector<std::string>> load_weights(
    const std::string& where,
    std::function<py::object()> open,
    std::function<at::Tensor(const std::string&)> read,
    const MaybeEngine& engine,
    std::pair<Loose, Names> model,
    bool strict) {
  auto contents = contents_of(engine, false, std::move(model.first), {});
  contents.tied = std::move(model.second);
  auto result = ckpt::load_weights(
      {where, called_with_gil<ckpt::Shapes>(std::move(open)), std::move(read)}, contents, strict);
  return {std::move(result.missing), std::move(result.unexpected)};
}

std::vector<std::pair<std::string, std::string>> verify(const std::string& directory) {
  std::vector<std::pair<std::string, std::string>> problems;
  for (ckpt::Problem& problem : ckpt::verify(directory, ckpt::read_manifest(directory))) {
    problems.emplace_back(std::move(problem.file), std::move(problem.text));
  }
  return problems;
}

} // namespace

void init_weights(py::module_& module) {
  module.def(
      "consolidate",
      [](const std::string& directory,
         const std::string& file,
         std::optional<at::ScalarType> dtype,
         int64_t max_file_bytes,
         bool tied,
         bool verify) {
        return consolidate(
            directory,
            file,
            {.dtype = dtype, .max_file_bytes = max_file_bytes, .tied = tied, .verify = verify});
      },
      py::arg("directory"),
      py::arg("file"),
      py::arg("dtype"),
      py::arg("max_file_bytes"),
      py::arg("tied"),
      py::arg("verify"),
      NoGil(),
      "Whole tensors of a checkpoint in safetensors files; their paths.");
  module.def(
      "read_manifest",
      [](const std::string& directory) { return ckpt::to_json(ckpt::read_manifest(directory)); },
      py::arg("directory"),
      NoGil(),
      "The JSON text of a checkpoint's manifest, checked.");
  module.def(
      "verify_checkpoint",
      &verify,
      py::arg("directory"),
      NoGil(),
      "Reads all data of a checkpoint; (file, what is wrong with it) of each problem.");
  module.def(
      "load_weights",
      &load_weights,
      py::arg("where"),
      py::arg("open"),
      py::arg("read"),
      py::arg("engine"),
      py::arg("model"),
      py::arg("strict"),
      NoGil(),
      "[collective] Loads whole tensors: `open` gives all names and shapes, `read` the tensor "
      "of a\nname. `model`: (name, tensor, whether it is a parameter) of what the engine does not "
      "hold, and\n(name, first name) of what is tied. (missing, unexpected) names.");
}

} // namespace zero::bindings
