// The forward hooks of units: no Python runs between a module and the engine.

#include "bindings.h"

#include <zero/optim/engine.h>

namespace zero::bindings {
namespace {

// Hooks of a module: called with whatever torch hands to hooks, kept alive by the
// module that they are registered on. They hold the engine, so that a sharded
// module works for as long as it lives.
struct UnitHook {
  std::shared_ptr<Engine> engine;
  int64_t unit = 0;
  bool enters = true;

  void call(const py::Args<py::object>& arguments) const {
    const bool failed = !enters && unit == 0 && left_by_exception(arguments);
    const py::gil_scoped_release release;
    if (enters) {
      engine->enter_unit(unit);
    } else {
      engine->leave_unit(unit);
    }
    if (failed) {
      engine->abandon_forward();
    }
  }

  // torch calls hooks without an output then, and while it handles the exception.
  static bool left_by_exception(const py::Args<py::object>& arguments) {
    if (arguments.size() < 3 || !arguments[2].is_none()) {
      return false;
    }
    py::object type;
    py::object value;
    py::object traceback;
    PyErr_GetExcInfo(&type.ptr(), &value.ptr(), &traceback.ptr());
    return value && !value.is_none();
  }
};

[[noreturn]] void refuse_copy() {
  throw py::type_error(
      "a model sharded at stage 3 can't be copied or pickled: this rank holds a part of it; take "
      "zero_torch.state_dict(model), or make it a plain model with zero_torch.unwrap(model) first");
}

} // namespace

void init_unit_hook(py::module_& module) {
  py::class_<UnitHook>(module, "UnitHook", "A forward hook of a unit's module.")
      .def(
          py::init([](std::shared_ptr<Engine> engine, int64_t unit, bool enters) {
            return UnitHook{std::move(engine), unit, enters};
          }),
          py::arg("engine"),
          py::arg("unit"),
          py::arg("enters"))
      .def("__call__", &UnitHook::call)
      .def(
          "__deepcopy__",
          [](const UnitHook&, const py::object&) -> py::object { refuse_copy(); },
          py::arg("memo"))
      .def(
          "__reduce_ex__",
          [](const UnitHook&, const py::object&) -> py::object { refuse_copy(); },
          py::arg("protocol"));
}

} // namespace zero::bindings
