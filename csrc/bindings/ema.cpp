#include "bindings.h"

#include <zero/optim/ema.h>

namespace zero::bindings {

using NoGil = py::call_guard<py::gil_scoped_release>;

void init_ema(py::module_& module) {
  py::class_<EMA>(module, "EMA", "A sharded average of an engine's parameters.")
      .def(
          py::init<std::shared_ptr<Engine>, double>(),
          py::arg("engine"),
          py::arg("decay"),
          NoGil(),
          "Starts at the present values.")
      .def_property("decay", &EMA::decay, &EMA::set_decay)
      .def_property("updates", &EMA::updates, &EMA::set_updates)
      .def_property_readonly("swapped", &EMA::is_swapped)
      .def("update", &EMA::update, NoGil(), "Takes the present values in.")
      .def("swap", &EMA::swap, NoGil(), "[collective] Exchanges averages and parameters.")
      .def(
          "average",
          py::overload_cast<int64_t>(&EMA::average),
          py::arg("index"),
          NoGil(),
          "[collective at stages 1 to 3] A whole average.")
      .def(
          "load",
          &EMA::load,
          py::arg("index"),
          py::arg("whole"),
          NoGil(),
          "An average from a whole tensor, the same on all ranks.")
      .def("bytes", &EMA::bytes, NoGil(), "What the averages take on this rank.");
}

} // namespace zero::bindings
