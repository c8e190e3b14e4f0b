// The engine's gradients between backward and step.

#include "engine_class.h"

#include <memory>
#include <optional>

#include <pybind11/functional.h>

namespace zero::bindings {

void bind_gradients(EngineClass& engine) {
  engine.def("zero_grad", &Engine::zero_grad, py::arg("set_to_none"), NoGil())
      .def(
          "grad_norm",
          [](Engine& self, double norm_type) { return self.grad_norm(norm_type).tensor(); },
          py::arg("norm_type"),
          NoGil(),
          "[collective] The norm of the whole gradient; the same bits on every rank.")
      .def(
          "grad_norms",
          [](Engine& self, double norm_type) {
            std::vector<at::Tensor> norms;
            for (const GradNorm& norm : self.grad_norms(norm_type)) {
              norms.push_back(norm.tensor());
            }
            return norms;
          },
          py::arg("norm_type"),
          NoGil(),
          "[collective] The norm of each group's gradient, in one exchange.")
      .def(
          "clip_grad_norm",
          [](Engine& self, double max_norm, double norm_type, bool error_if_nonfinite) {
            return self.clip_grad_norm(max_norm, norm_type, error_if_nonfinite).tensor();
          },
          py::arg("max_norm"),
          py::arg("norm_type"),
          py::arg("error_if_nonfinite") = false,
          NoGil(),
          "[collective] Scales gradients by min(1, max_norm / (norm + 1e-6)); returns the norm "
          "before.")
      .def(
          "clip_grad_value",
          &Engine::clip_grad_value,
          py::arg("clip_value"),
          NoGil(),
          "[collective] Clamps gradients to [-clip_value, clip_value].")
      .def(
          "divide_gradients",
          &Engine::divide_gradients,
          py::arg("divisor"),
          py::arg("across_ranks"),
          NoGil(),
          "[collective] Divides gradients by the divisor, or by the sum of all ranks' divisors; "
          "returns it.")
      .def(
          "unscale",
          &Engine::unscale,
          py::arg("factor"),
          NoGil(),
          "[collective] Multiplies every gradient. The index of the first parameter with an inf "
          "or NaN\non any rank, or -1.")
      .def(
          "scale_gradients",
          &Engine::scale_gradients,
          py::arg("factor"),
          NoGil(),
          "Multiplies every gradient by a device's number; parameters are on that device.")
      .def(
          "agree_nonfinite",
          &Engine::agree_nonfinite,
          py::arg("found"),
          NoGil(),
          "[collective] found (fp32, one element) becomes 1 on all ranks where it is not 0 on one.")
      .def(
          "leave_out_where",
          &Engine::leave_out_where,
          py::arg("found"),
          NoGil(),
          "The next native step is left out, on the device, where found is not 0.")
      .def_property_readonly("device", &Engine::device, "Where all that is sharded is.")
      .def(
          "register_comm_hook",
          [](Engine& self, std::optional<std::shared_ptr<CommHook>> hook) {
            self.register_comm_hook(hook.value_or(nullptr));
          },
          py::arg("hook"),
          NoGil(),
          "[collective] Replaces the reduction of gradient buckets; None: nothing does. Raises\n"
          "ValueError on all ranks when they name different hooks.")
      .def(
          "set_rule_source",
          [](Engine& self, std::function<py::object()> source) {
            self.set_rule_source(called_with_gil<std::vector<Rule>>(std::move(source)));
          },
          py::arg("source"),
          "step_in_backward: asked for the rules, one a group, when a backward opens.")
      .def(
          "make_trainable",
          &Engine::make_trainable,
          py::arg("indices"),
          NoGil(),
          "Parameters that were frozen when they came can have gradients and state from now on. "
          "The same on all ranks; no communication.");
}

} // namespace zero::bindings
