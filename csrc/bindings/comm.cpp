// How this process finds its peers, and how a thread that waits for them lets
// go of the interpreter.

#include "bindings.h"

#include <pybind11/stl.h>

#include <zero/comm/blocking.h>
#include <zero/comm/groups.h>
#include <zero/comm/init.h>
#include <zero/comm/meeting.h>
#include <zero/comm/nccl_group.h>

namespace zero::bindings {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// A thread that holds the GIL must not wait for other ranks with it: what it
// waits for may need the GIL (ranks as threads, Python hooks, the release of a
// tensor that Python knows).
void* release_gil() {
  return Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
}

void reacquire_gil(void* state) {
  if (state != nullptr) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state));
  }
}

} // namespace

void init_comm(py::module_& module) {
  comm::set_blocking_hooks(&release_gil, &reacquire_gil);

  py::class_<LaunchEnvironment>(module, "LaunchEnvironment", "What a launcher told this process.")
      .def_readonly("rank", &LaunchEnvironment::rank)
      .def_readonly("world_size", &LaunchEnvironment::world_size)
      .def_readonly("local_rank", &LaunchEnvironment::local_rank)
      .def_readonly("master_addr", &LaunchEnvironment::master_addr)
      .def_readonly("master_port", &LaunchEnvironment::master_port)
      .def_readonly(
          "launcher",
          &LaunchEnvironment::launcher,
          "\"torchrun\", \"openmpi\", \"pmi\" or \"slurm\".");
  module.def(
      "launch_environment",
      &launch_environment,
      "What torchrun's variables say, else Open MPI's, MPICH's or Slurm's; None without a "
      "launcher.\n"
      "Raises ValueError naming a variable that is missing or malformed.");

  module.def("has_nccl", &comm::has_nccl, "Whether this build has its parts for CUDA.");
  module.def(
      "nccl_obstacle",
      [](c10d::Store& store, int64_t rank, int64_t size, const std::string& gpu, double seconds) {
        const auto gpus = comm::tell_all(store, "zero/gpu", rank, size, gpu, seconds);
        return comm::nccl_obstacle(gpus);
      },
      py::arg("store"),
      py::arg("rank"),
      py::arg("world_size"),
      py::arg("gpu"),
      py::arg("timeout_seconds"),
      py::call_guard<py::gil_scoped_release>(),
      "[collective] Why NCCL cannot connect these ranks; \"\" where it can. ``gpu``: what names "
      "this rank's and no other, \"\" for none. Asked once of a c10d ``store``.");
  module.attr("GPU_REMEDY") = comm::kGpuRemedy;

  py::class_<Groups>(module, "Groups", "A grid of ranks: hybrid sharding.")
      .def(
          py::init([](Group shard, Group replicate) {
            return Groups{.shard = std::move(shard), .replicate = std::move(replicate)};
          }),
          py::arg("shard"),
          py::arg("replicate"));
  module.def(
      "exchange_texts",
      &comm::exchange_texts,
      py::arg("group"),
      py::arg("text"),
      py::arg("timeout_seconds"),
      py::call_guard<py::gil_scoped_release>(),
      "[collective] Every rank's text, in rank order, through the group's store.");
}

} // namespace zero::bindings
