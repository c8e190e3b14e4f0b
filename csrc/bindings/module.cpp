#include "bindings.h"

#include <torch/csrc/Exceptions.h>

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ core of zero_torch. The public names are those of zero_torch itself.";
  // c10::ValueError becomes ValueError and so on, as in torch's own bindings.
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) {
        std::rethrow_exception(error);
      }
    } catch (const c10::Error&) {
      torch::translate_exception_to_python(error);
    } catch (python_error& raised) { // by a hook that is written in Python
      raised.restore();
    }
  });
  zero::bindings::init_layout(module);
  zero::bindings::init_options(module);
  zero::bindings::init_comm(module);
  zero::bindings::init_comm_hooks(module);
  zero::bindings::init_engine(module);
  zero::bindings::init_ema(module);
  zero::bindings::init_checkpoint(module);
  zero::bindings::init_weights(module);
  zero::bindings::init_unit_hook(module);
}
