#include <zero/autograd/use_guard.h>

#include <memory>
#include <mutex>

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <zero/memory/slab_view.h>

namespace zero::autograd {
namespace {

void bring_back(const at::Tensor& tensor, const at::RecordFunction& function) {
  if (memory::OnUse* owner = memory::SlabView::closed_by(tensor)) {
    // Observers stay off inside, so that waiting is never observed itself.
    const at::DisableRecordFunctionGuard unobserved;
    owner->before_use(function.name());
  }
}

void inspect(const c10::IValue& value, const at::RecordFunction& function) {
  if (value.isTensor()) {
    bring_back(value.toTensor(), function);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      bring_back(tensor, function);
    }
  } else if (value.isList()) { // optional tensors, as of an index
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor()) {
        bring_back(item.toTensor(), function);
      }
    }
  }
}

std::unique_ptr<at::ObserverContext> before_operation(const at::RecordFunction& function) {
  for (const c10::IValue& input : function.inputs()) {
    inspect(input, function);
  }
  return nullptr;
}

// Lives as long as the process: operations still run after static destructors.
struct Registration {
  std::mutex mutex;
  int64_t wanted = 0;
  at::CallbackHandle handle = 0;
  bool registered = false;
};

Registration& registration() {
  static auto* shared = new Registration();
  return *shared;
}

} // namespace

void want_use_guard(bool on) {
  Registration& shared = registration();
  const std::lock_guard lock(shared.mutex);
  shared.wanted += on ? 1 : -1;
  if (on && shared.wanted == 1) {
    if (shared.registered) {
      at::reenableCallback(shared.handle);
    } else {
      shared.handle = at::addGlobalCallback(
          at::RecordFunctionCallback(&before_operation)
              .needsInputs(true)
              .scopes({at::RecordScope::FUNCTION}));
      shared.registered = true;
    }
  } else if (!on && shared.wanted == 0) {
    at::disableCallback(shared.handle);
  }
}

} // namespace zero::autograd
