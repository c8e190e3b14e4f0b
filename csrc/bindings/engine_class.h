#pragma once

// The bindings of Engine, whose methods are in several files.

#include "bindings.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <zero/optim/engine.h>

namespace zero::bindings {

using NoGil = py::call_guard<py::gil_scoped_release>;
using EngineClass = py::class_<Engine, std::shared_ptr<Engine>>;

// A Python function for C++, which calls it without the GIL. It returns py::object there,
// since pybind11's versions differ in what they call a list that is returned.
template <typename Value>
std::function<Value()> called_with_gil(std::function<py::object()> source) {
  return [source = std::move(source)] {
    const py::gil_scoped_acquire gil;
    return source().template cast<Value>();
  };
}

// What happens to gradients between backward and step.
void bind_gradients(EngineClass& engine);
// What ranks tell each other.
void bind_agreement(EngineClass& engine);
// Uneven data.
void bind_join(EngineClass& engine);

} // namespace zero::bindings
