// Options and the native optimizer rules: plain values, no communication.

#include "bindings.h"

#include <pybind11/stl.h>

#include <zero/options.h>

namespace zero::bindings {
namespace {

void bind_options(py::module_& module) {
  py::class_<Options>(module, "Options", "What a user may set; zero_torch.ZeroConfig mirrors it.")
      .def(py::init<>())
      .def_readwrite("stage", &Options::stage)
      .def_readwrite("bucket_bytes", &Options::bucket_bytes)
      .def_readwrite("first_bucket_bytes", &Options::first_bucket_bytes)
      .def_readwrite("prefetch", &Options::prefetch)
      .def_readwrite("reshard_after_forward", &Options::reshard_after_forward)
      .def_readwrite("units", &Options::units)
      .def_readwrite("min_unit_numel", &Options::min_unit_numel)
      .def_readwrite("max_live_numel", &Options::max_live_numel)
      .def_readwrite("param_dtype", &Options::param_dtype)
      .def_readwrite("reduce_dtype", &Options::reduce_dtype)
      .def_readwrite("master_dtype", &Options::master_dtype)
      .def_readwrite("output_dtype", &Options::output_dtype)
      .def_readwrite("cast_forward_inputs", &Options::cast_forward_inputs)
      .def_readwrite("average", &Options::average)
      .def_readwrite("transport", &Options::transport)
      .def_readwrite("timeout", &Options::timeout)
      .def_readwrite("on_nonfinite", &Options::on_nonfinite)
      .def_readwrite("sync_buffers", &Options::sync_buffers)
      .def_readwrite("ignored_params", &Options::ignored_params)
      .def_readwrite("step_in_backward", &Options::step_in_backward)
      .def_readwrite("offload", &Options::offload)
      .def_readwrite("registered_buffers", &Options::registered_buffers)
      .def_readwrite("shard_group", &Options::shard_group)
      .def_readwrite("replicate_group", &Options::replicate_group)
      .def(
          "validate",
          &Options::validate,
          "Raises ValueError, naming the option, the value and what is allowed.");
}

// AdamW and Adam differ in defaults and in what weight decay means only.
template <typename T>
void bind_adam(py::module_& module, const char* name, const char* doc) {
  const T defaults;
  py::class_<T>(module, name, doc)
      .def(
          py::init([](double lr,
                      std::array<double, 2> betas,
                      double eps,
                      double weight_decay,
                      bool amsgrad,
                      bool maximize) {
            return T{
                .lr = lr,
                .betas = betas,
                .eps = eps,
                .weight_decay = weight_decay,
                .amsgrad = amsgrad,
                .maximize = maximize};
          }),
          py::kw_only(),
          py::arg("lr") = defaults.lr,
          py::arg("betas") = std::make_pair(defaults.betas[0], defaults.betas[1]),
          py::arg("eps") = defaults.eps,
          py::arg("weight_decay") = defaults.weight_decay,
          py::arg("amsgrad") = defaults.amsgrad,
          py::arg("maximize") = defaults.maximize)
      .def_readwrite("lr", &T::lr)
      .def_readwrite("betas", &T::betas)
      .def_readwrite("eps", &T::eps)
      .def_readwrite("weight_decay", &T::weight_decay)
      .def_readwrite("amsgrad", &T::amsgrad)
      .def_readwrite("maximize", &T::maximize);
}

void bind_sgd(py::module_& module) {
  const SGD defaults;
  py::class_<SGD>(module, "SGD", "Stochastic gradient descent with momentum, as torch.optim.SGD.")
      .def(
          py::init([](double lr,
                      double momentum,
                      double dampening,
                      double weight_decay,
                      bool nesterov,
                      bool maximize) {
            return SGD{
                .lr = lr,
                .momentum = momentum,
                .dampening = dampening,
                .weight_decay = weight_decay,
                .nesterov = nesterov,
                .maximize = maximize};
          }),
          py::kw_only(),
          py::arg("lr") = defaults.lr,
          py::arg("momentum") = defaults.momentum,
          py::arg("dampening") = defaults.dampening,
          py::arg("weight_decay") = defaults.weight_decay,
          py::arg("nesterov") = defaults.nesterov,
          py::arg("maximize") = defaults.maximize)
      .def_readwrite("lr", &SGD::lr)
      .def_readwrite("momentum", &SGD::momentum)
      .def_readwrite("dampening", &SGD::dampening)
      .def_readwrite("weight_decay", &SGD::weight_decay)
      .def_readwrite("nesterov", &SGD::nesterov)
      .def_readwrite("maximize", &SGD::maximize);
}

void bind_lion(py::module_& module) {
  const Lion defaults;
  py::class_<Lion>(module, "Lion", "The sign of an interpolated moment, with one state tensor.")
      .def(
          py::init([](double lr, std::array<double, 2> betas, double weight_decay, bool maximize) {
            return Lion{
                .lr = lr, .betas = betas, .weight_decay = weight_decay, .maximize = maximize};
          }),
          py::kw_only(),
          py::arg("lr") = defaults.lr,
          py::arg("betas") = std::make_pair(defaults.betas[0], defaults.betas[1]),
          py::arg("weight_decay") = defaults.weight_decay,
          py::arg("maximize") = defaults.maximize)
      .def_readwrite("lr", &Lion::lr)
      .def_readwrite("betas", &Lion::betas)
      .def_readwrite("weight_decay", &Lion::weight_decay)
      .def_readwrite("maximize", &Lion::maximize);
}

} // namespace

void init_options(py::module_& module) {
  bind_options(module);
  bind_adam<AdamW>(module, "AdamW", "Adam with decoupled weight decay, as torch.optim.AdamW.");
  bind_adam<Adam>(module, "Adam", "Adam with L2 weight decay, as torch.optim.Adam.");
  bind_sgd(module);
  bind_lion(module);
  module.def(
      "validate_rule",
      [](const Rule& rule) { validate(rule); },
      py::arg("rule"),
      "Raises ValueError naming the hyper-parameter and its allowed range.");
}

} // namespace zero::bindings
