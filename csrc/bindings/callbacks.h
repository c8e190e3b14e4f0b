#pragma once

#include <functional>
#include <utility>

#include "bindings.h"

namespace zero::bindings {

// A Python function for C++, which calls it without the GIL. It returns py::object there,
// since pybind11's versions differ in what they call a list that is returned.
template <typename Value>
std::function<Value()> called_with_gil(std::function<py::object()> source) {
  return [source = std::move(source)] {
    const py::gil_scoped_acquire gil;
    return source().template cast<Value>();
  };
}

} // namespace zero::bindings
