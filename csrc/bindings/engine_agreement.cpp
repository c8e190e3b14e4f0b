// What ranks tell each other through the engine, outside of training's own traffic.

#include "engine_class.h"

#include <pybind11/functional.h>

namespace zero::bindings {
namespace {

// (name, buffer, whether it is a running statistic).
using NamedBuffers = std::vector<std::tuple<std::string, at::Tensor, bool>>;

void set_buffers(Engine& engine, std::function<py::object()> source) {
  engine.set_buffers([call = called_with_gil<NamedBuffers>(std::move(source))] {
    std::vector<NamedBuffer> buffers;
    for (auto& [name, tensor, statistics] : call()) {
      buffers.push_back({name, tensor, statistics});
    }
    return buffers;
  });
}

} // namespace

void bind_agreement(EngineClass& engine) {
  engine
      .def(
          "set_buffers",
          &set_buffers,
          py::arg("source"),
          "Which buffers sync_buffers() is about, asked for at each call: (name, buffer, whether "
          "it is\na running statistic).")
      .def(
          "sync_buffers",
          &Engine::sync_buffers,
          NoGil(),
          "[collective] Rank 0's values of the buffers to all ranks.")
      .def(
          "broadcast_parameters",
          &Engine::broadcast_parameters,
          py::arg("indices"),
          py::arg("root"),
          NoGil(),
          "[collective] Rank `root`'s current values of parameters to all ranks.")
      .def(
          "broadcast",
          &Engine::broadcast,
          py::arg("tensors"),
          py::arg("root"),
          NoGil(),
          "[collective] Rank `root`'s values of tensors that it doesn't manage to all ranks.")
      .def(
          "agree_any",
          &Engine::agree_any,
          py::arg("value"),
          NoGil(),
          "[collective] Whether any rank says true.")
      .def(
          "exchange",
          &Engine::exchange,
          py::arg("bytes"),
          NoGil(),
          "[collective] Every rank's bytes (one-dimensional uint8, any length), in rank order.");
}

} // namespace zero::bindings
