// Checkpoints: the core of zero_torch.save and zero_torch.load.

#include "bindings.h"
#include "contents.h"

#include <zero/checkpoint/averages.h>
#include <zero/checkpoint/background_save.h>
#include <zero/checkpoint/directory.h>
#include <zero/checkpoint/held.h>
#include <zero/checkpoint/load.h>
#include <zero/checkpoint/save.h>

namespace zero::bindings {

checkpoint::Contents
contents_of(const MaybeEngine& engine, bool native_state, Loose loose, Foreign foreign) {
  checkpoint::Contents contents{.engine = engine.value_or(nullptr), .native_state = native_state};
  for (auto& [name, tensor, parameter] : loose) {
    contents.loose.push_back(
        {std::move(name),
         std::move(tensor),
         parameter ? checkpoint::TensorKind::parameter : checkpoint::TensorKind::buffer});
  }
  for (auto& [index, name, values] : foreign) {
    contents.foreign.push_back({index, std::move(name), std::move(values)});
  }
  return contents;
}

namespace {

namespace ckpt = zero::checkpoint;
using NoGil = py::call_guard<py::gil_scoped_release>;

// Of save() and async_save(), which take the same.
template <auto save>
auto saving(
    const std::string& directory,
    const MaybeEngine& engine,
    bool native_state,
    Loose loose,
    Foreign foreign,
    Names tied,
    const std::tuple<std::string, std::string, std::string>& texts,
    int64_t keep_last,
    int64_t part_bytes) {
  auto contents = contents_of(engine, native_state, std::move(loose), std::move(foreign));
  contents.tied = std::move(tied);
  const auto& [optimizer, scalars, extra] = texts;
  return save(
      directory,
      contents,
      {.optimizer = optimizer,
       .scalars = scalars,
       .extra = extra,
       .keep_last = keep_last,
       .part_bytes = part_bytes});
}

Foreign averages_of(EMA& ema, const MaybeEngine& engine) {
  Foreign averages;
  for (auto& [index, name, values] : ckpt::averages_of(ema, engine.value_or(nullptr).get())) {
    averages.emplace_back(index, std::move(name), std::move(values));
  }
  return averages;
}

std::pair<std::vector<std::string>, std::vector<std::string>> load_model(
    ckpt::Checkpoint& checkpoint,
    const MaybeEngine& engine,
    Loose loose,
    bool strict,
    bool verify) {
  const auto contents = contents_of(engine, false, std::move(loose), {});
  ckpt::LoadResult result = checkpoint.load_model(contents, {.strict = strict, .verify = verify});
  return {std::move(result.missing), std::move(result.unexpected)};
}

void bind_held(py::module_& module) {
  module.def(
      "held_values",
      &ckpt::held_values,
      py::arg("engine"),
      NoGil(),
      "Views, by index, of what this rank holds of parameters that are sharded or have fp32 "
      "masters:\none-dimensional, or whole at stage 0.");
  module.def(
      "held_state",
      &ckpt::held_state,
      py::arg("engine"),
      NoGil(),
      "Views, by index and name, of this rank's part of native state, and \"step\".");
  module.def(
      "load_held_values",
      &ckpt::load_held_values,
      py::arg("engine"),
      py::arg("values"),
      NoGil(),
      "[collective] Copies tensors of the shapes of held_values() into them.");
  module.def(
      "load_held_state",
      &ckpt::load_held_state,
      py::arg("engine"),
      py::arg("index"),
      py::arg("state"),
      NoGil(),
      "Replaces a parameter's native state by tensors of the shapes of held_state().");
}

template <auto save>
void define_save(py::module_& module, const char* name, const char* text) {
  module.def(
      name,
      &saving<save>,
      py::arg("directory"),
      py::arg("engine"),
      py::arg("native_state"),
      py::arg("loose"),
      py::arg("foreign"),
      py::arg("tied"),
      py::arg("texts"),
      py::arg("keep_last"),
      py::arg("part_bytes"),
      NoGil(),
      text);
}

void define_background_save(py::module_& module) {
  py::class_<BackgroundSave, std::shared_ptr<BackgroundSave>>(
      module,
      "BackgroundSave",
      "A save that goes on in the background, from async_save(). Dropping it loses nothing.")
      .def_property_readonly("directory", &BackgroundSave::directory)
      .def("done", &BackgroundSave::done, NoGil(), "Whether it has ended, well or not.")
      .def(
          "wait",
          &BackgroundSave::wait,
          NoGil(),
          "Blocks until the checkpoint is on the disk; raises, each time, what went wrong, on "
          "every rank.");
  define_save<&ckpt::async_save>(
      module, "async_save_checkpoint", "[collective] The same, by a thread, from copies.");
  module.def(
      "finish_background_saves",
      &ckpt::finish_background_saves,
      NoGil(),
      "Waits for all of this process; errors that nobody saw go to stderr.");
}

} // namespace

void init_checkpoint(py::module_& module) {
  define_save<&ckpt::save>(
      module,
      "save_checkpoint",
      "[collective] Writes a checkpoint. `loose`: (name, tensor, whether it is a parameter) of "
      "what the\nengine does not hold; `foreign`: (index, name, this rank's part) of state outside "
      "of it;\n`texts`: JSON of the optimizer, of scalars and of the user's extra.");
  define_background_save(module);
  module.def(
      "averages_of",
      &averages_of,
      py::arg("ema"),
      py::arg("engine"),
      NoGil(),
      "What a checkpoint's `foreign` holds of an EMA.");
  module.attr("PART_BYTES") = ckpt::kPartBytes;
  module.def("latest_checkpoint", &ckpt::latest, py::arg("parent"), NoGil());
  bind_held(module);
  py::class_<ckpt::Checkpoint>(module, "Checkpoint", "An open checkpoint.")
      .def(
          py::init([](std::string directory, const MaybeEngine& engine) {
            return std::make_unique<ckpt::Checkpoint>(
                std::move(directory), engine.value_or(nullptr).get());
          }),
          py::arg("directory"),
          py::arg("engine"),
          NoGil(),
          "[collective] Reads the manifest.")
      .def_property_readonly(
          "optimizer", [](const ckpt::Checkpoint& self) { return self.manifest().optimizer; })
      .def_property_readonly(
          "scalars", [](const ckpt::Checkpoint& self) { return self.manifest().scalars; })
      .def_property_readonly(
          "extra", [](const ckpt::Checkpoint& self) { return self.manifest().extra; })
      .def("state_of", &ckpt::Checkpoint::state_of, py::arg("parameter"), NoGil())
      .def(
          "load_model",
          &load_model,
          py::arg("engine"),
          py::arg("loose"),
          py::arg("strict"),
          py::arg("verify"),
          NoGil(),
          "[collective] Parameters and buffers; (missing, unexpected) names.")
      .def(
          "load_native_state",
          &ckpt::Checkpoint::load_native_state,
          py::arg("engine"),
          py::arg("steps"),
          py::arg("verify"),
          NoGil(),
          "[collective] State of native rules, by the steps of each parameter's name.")
      .def(
          "read_state",
          &ckpt::Checkpoint::read_state,
          py::arg("engine"),
          py::arg("index"),
          py::arg("state"),
          NoGil(),
          "The part of a state tensor that this rank steps.")
      .def(
          "require_averages",
          [](const ckpt::Checkpoint& self, EMA& ema, const MaybeEngine& engine) {
            ckpt::require_averages(self, ema, engine.value_or(nullptr).get());
          },
          py::arg("ema"),
          py::arg("engine"),
          NoGil(),
          "Raises where these are not of this engine, or not in the checkpoint.")
      .def(
          "load_averages",
          &ckpt::load_averages,
          py::arg("ema"),
          NoGil(),
          "[collective] Averages and settings of an EMA, after the parameters.")
      .def(
          "verify_state",
          [](ckpt::Checkpoint& self, const MaybeEngine& engine) {
            self.verify_state(engine.value_or(nullptr).get());
          },
          py::arg("engine"),
          NoGil(),
          "[collective] Compares the checksums of state.");
}

} // namespace zero::bindings
