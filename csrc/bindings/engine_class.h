#pragma once

// The bindings of Engine, whose methods are in several files.

#include "bindings.h"
#include "callbacks.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <zero/optim/engine.h>

namespace zero::bindings {

using NoGil = py::call_guard<py::gil_scoped_release>;
using EngineClass = py::class_<Engine, std::shared_ptr<Engine>>;

// What happens to gradients between backward and step.
void bind_gradients(EngineClass& engine);
// What ranks tell each other.
void bind_agreement(EngineClass& engine);
// Uneven data.
void bind_join(EngineClass& engine);

} // namespace zero::bindings
