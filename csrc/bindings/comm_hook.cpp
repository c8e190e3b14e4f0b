// Comm hooks that are written in Python. They are called under the engine's lock, which
// is always taken before the GIL.

#include "bindings.h"

#include <exception>
#include <utility>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <zero/comm/local_communicator.h>
#include <zero/sharding/comm_hook.h>

namespace zero::bindings {
namespace {

// A Python object that any thread may drop.
class Held {
 public:
  explicit Held(py::object object) : object_(std::move(object)) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (Py_IsInitialized() == 0) {
      object_.release();
      return;
    }
    const py::gil_scoped_acquire acquire;
    object_ = py::object();
  }
  const py::object& get() const {
    return object_;
  }

 private:
  py::object object_;
};

// The hook's own error, which may be raised more than once and on another thread.
[[noreturn]] void raise(py::error_already_set& error) {
  error.restore();
  python_error raised;
  raised.persist();
  throw raised;
}

void take(
    const GradientBucket& bucket,
    py::object finished,
    const at::Tensor& output,
    const at::Tensor& addend) {
  const bool listed = py::isinstance<py::list>(finished) || py::isinstance<py::tuple>(finished);
  if (listed && py::len(finished) == 1) { // what futures of collectives hold
    finished = finished[py::int_(0)];
  }
  TORCH_CHECK_TYPE(
      THPVariable_Check(finished.ptr()),
      "[zero.sharding] expected a comm hook to return a tensor, or a torch.futures.Future of one, "
      "got ",
      std::string(py::str(py::type::of(finished).attr("__name__"))),
      " for ",
      bucket.what,
      " (rank ",
      bucket.rank,
      " of ",
      bucket.world_size,
      ")");
  take_finished(bucket, THPVariable_Unpack(finished.ptr()), output, addend);
}

class Future final : public comm::Work {
 public:
  Future(py::object future, const GradientBucket& bucket, at::Tensor output, at::Tensor addend)
      : future_(std::move(future)),
        bucket_(bucket),
        output_(std::move(output)),
        addend_(std::move(addend)) {}

  void wait() override {
    if (error_) {
      std::rethrow_exception(error_);
    }
    if (taken_) {
      return;
    }
    try {
      take_result();
      taken_ = true;
    } catch (...) {
      error_ = std::current_exception();
      throw;
    }
  }

  bool done() const override {
    const py::gil_scoped_acquire acquire;
    return taken_ || error_ || future_.get().attr("done")().cast<bool>();
  }

  bool settle() noexcept override {
    try {
      wait();
      return true;
    } catch (...) {
      return false;
    }
  }

 private:
  void take_result() {
    const py::gil_scoped_acquire acquire;
    try {
      take(bucket_, future_.get().attr("wait")(), output_, addend_);
    } catch (py::error_already_set& error) {
      raise(error);
    }
  }

  const Held future_;
  const GradientBucket bucket_;
  const at::Tensor output_;
  const at::Tensor addend_;
  bool taken_ = false;
  std::exception_ptr error_;
};

class PythonHook final : public CommHook {
 public:
  PythonHook(std::string name, py::object callable)
      : name_(std::move(name)), callable_(std::move(callable)) {}

  std::string name() const override {
    return name_;
  }

  comm::WorkPtr reduce(
      const GradientBucket& bucket,
      comm::Communicator& /*communicator*/,
      at::Tensor output,
      comm::Reduction reduction,
      comm::Tag /*tag*/) override {
    const py::gil_scoped_acquire acquire;
    try {
      py::object result = callable_.get()(bucket);
      if (THPVariable_Check(result.ptr()) || !py::hasattr(result, "wait")) {
        take(bucket, std::move(result), output, reduction.addend);
        return comm::done_work();
      }
      return std::make_shared<Future>(
          std::move(result), bucket, std::move(output), std::move(reduction.addend));
    } catch (py::error_already_set& error) {
      raise(error);
    }
  }

 private:
  const std::string name_;
  const Held callable_;
};

} // namespace

void init_comm_hooks(py::module_& module) {
  py::class_<GradientBucket>(
      module,
      "GradientBucket",
      "What a comm hook is given: a bucket of gradients that is about to be reduced.")
      .def_readonly("index", &GradientBucket::index, "The bucket's number.")
      .def_readonly("names", &GradientBucket::names, "Of its parameters, in order of memory.")
      .def_readonly(
          "gradients",
          &GradientBucket::gradients,
          "This rank's whole gradient, not divided: one-dimensional, contiguous, zeros in the\n"
          "padding. It may be overwritten.")
      .def_property_readonly(
          "shard",
          &GradientBucket::shard,
          "The part of `gradients` that this rank is to have reduced, sharing its memory.")
      .def_readonly("rank", &GradientBucket::rank)
      .def_readonly("world_size", &GradientBucket::world_size)
      .def_property_readonly(
          "dtype",
          [](const GradientBucket& self) { return self.gradients.scalar_type(); },
          "Of `gradients`.");
  py::class_<CommHook, std::shared_ptr<CommHook>>(
      module, "CommHook", "What replaces the reduction of a gradient bucket.")
      .def_property_readonly("name", &CommHook::name);
  module.def("compress_bf16", &compress_bf16, "fp32 gradients travel in bfloat16, summed in fp32.");
  module.def(
      "compress_fp16",
      &compress_fp16,
      "fp32 gradients travel in float16, divided before they are rounded, summed in fp32.");
  module.def(
      "python_comm_hook",
      [](std::string name, py::object callable) -> std::shared_ptr<CommHook> {
        return std::make_shared<PythonHook>(std::move(name), std::move(callable));
      },
      py::arg("name"),
      py::arg("callable"),
      "A hook from `callable(bucket)`, which gives the finished gradient, or a future of it.");
}

} // namespace zero::bindings
