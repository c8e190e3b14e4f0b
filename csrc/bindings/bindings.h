#pragma once

// The Python extension zero_torch._C: one init_*() an area, called by
// module.cpp. Docstrings of what Python sees live beside the bindings; the
// stub python/zero_torch/_C.pyi is generated from them.

#include <torch/csrc/utils/pybind.h>

namespace zero::bindings {

void init_layout(py::module_& module);
void init_options(py::module_& module);
void init_comm(py::module_& module);
void init_comm_hooks(py::module_& module);
void init_engine(py::module_& module);
void init_ema(py::module_& module);
void init_checkpoint(py::module_& module);
void init_weights(py::module_& module);
void init_unit_hook(py::module_& module);

} // namespace zero::bindings
