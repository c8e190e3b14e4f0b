// The Python module zero_fake_device: fake devices for tests of the Python face. Importing
// it after zero_torch makes "fake:0" to "fake:3" devices of torch, and known to Zero.

#include <string>
#include <utility>
#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include <zero/comm/device_backend.h>
#include <zero/comm/init.h>
#include <zero/memory/device_kernels.h>

#include "fake_backend.h"
#include "fake_device.h"
#include "fake_kernels.h"

namespace {

namespace fake = zero::fake;
using Store = c10::intrusive_ptr<c10d::Store>;

void make_known() {
  static const auto* kernels = new fake::FakeKernels(zero::kernels::host_device_kernels());
  zero::memory::register_device_kernels(c10::DeviceType::PrivateUse1, *kernels);
  zero::comm::register_device_backend(
      c10::DeviceType::PrivateUse1,
      [](const Store& store, int64_t rank, int64_t size, double, c10::Device) {
        return fake::make_backend(store, rank, size, /*high_priority=*/true);
      });
}

c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1);
}

// (name, stream) of what ran on a device, in the host's order.
std::vector<std::pair<std::string, int64_t>> operations(c10::DeviceIndex device) {
  std::vector<std::pair<std::string, int64_t>> result;
  for (const fake::Entry& entry : fake::operations("", device)) {
    result.emplace_back(entry.name, entry.stream);
  }
  return result;
}

} // namespace

PYBIND11_MODULE(zero_fake_device, module) {
  make_known();
  module.attr("device_count") = static_cast<int64_t>(fake::device_count);
  module.def("reset", &fake::reset);
  module.def("check", &fake::check);
  module.def("take_errors", &fake::take_errors);
  module.def("operations", &operations);
  module.def("current_device", [] { return guard().getDevice().index(); });
  module.def(
      "set_device", [](c10::DeviceIndex device) { guard().setDevice(fake::device(device)); });
  module.def("peak", [](c10::DeviceIndex device) { return fake::memory(device).peak; });
  module.def("held", [](c10::DeviceIndex device) { return fake::memory(device).bytes; });
  module.def("reset_peak", &fake::reset_peak);
  module.def("stream", [](c10::DeviceIndex device) { return fake::current_stream(device).id(); });
  // Ranks that are threads meet at a store; Gloo is for their messages.
  module.def(
      "make_group",
      [](const Store& store, int64_t rank, int64_t size) {
        return zero::make_gloo_group(store, rank, size, 60.0);
      },
      py::call_guard<py::gil_scoped_release>());
  py::class_<fake::NoSynchronization>(module, "NoSynchronization")
      .def(py::init<c10::DeviceIndex>());
}
