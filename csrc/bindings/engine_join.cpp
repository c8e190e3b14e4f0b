// Uneven data.

#include "engine_class.h"

#include <pybind11/functional.h>

namespace zero::bindings {
namespace {

using Step = std::function<void(py::bytes)>;

void shadow(Engine& engine, const Step& step) {
  const py::gil_scoped_release release;
  engine.shadow_join([&step](const std::string& hyperparameters) {
    const py::gil_scoped_acquire acquire;
    step(py::bytes(hyperparameters));
  });
}

} // namespace

void bind_join(EngineClass& engine) {
  engine
      .def(
          "begin_join",
          &Engine::begin_join,
          py::arg("over_active"),
          NoGil(),
          "[collective] From here on ranks tell each other what they are about to do.")
      .def("joining", &Engine::joining, NoGil(), "Whether a join is open.")
      .def(
          "shadow_join",
          &shadow,
          py::arg("step"),
          "[collective] This rank's data has ended: takes part in what the others do until it has\n"
          "on all. `step(hyperparameters)` follows a step by somebody else's rule.")
      .def(
          "fail_join",
          &Engine::fail_join,
          py::arg("why"),
          NoGil(),
          "Ends a join that an exception left: the other ranks raise.");
}

} // namespace zero::bindings
