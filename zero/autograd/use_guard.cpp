#include <zero/autograd/use_guard.h>

#include <memory>
#include <mutex>

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>

#include <zero/autograd/operation_traits.h>
#include <zero/memory/slab_view.h>

namespace zero::autograd {
namespace {

// The views of ours among an operation's inputs. Few operations have many.
class Inputs {
 public:
  explicit Inputs(const at::RecordFunction& function) {
    int64_t index = 0;
    for (const c10::IValue& value : function.inputs()) {
      add(value, index++);
    }
  }

  bool empty() const {
    return found_.empty();
  }

  // Whether the operation finds what it reads.
  bool announce(const at::RecordFunction& function) const {
    const OperationTraits traits = traits_of(function);
    bool opens = false;
    for (const Input& input : found_) {
      opens = opens || input.keeper.closed;
    }
    if (!opens && traits.writes == 0) {
      for (const Input& input : found_) {
        if (traits.reads) {
          input.keeper.on_use->while_open();
        }
      }
      return true;
    }
    bool found = true;
    for (const Input& input : found_) {
      input.keeper.on_use->pin();
    }
    for (const Input& input : found_) {
      if (traits.writes_argument(input.argument)) {
        input.keeper.on_use->before_write(input.storage, function.name());
      } else if (input.keeper.closed && traits.reads) {
        found = input.keeper.on_use->before_use(function.name()) && found;
      } else if (input.keeper.closed) {
        input.keeper.on_use->before_view(function.name());
      }
    }
    for (const Input& input : found_) {
      input.keeper.on_use->unpin();
    }
    return found;
  }

 private:
  struct Input {
    memory::SlabView::Keeper keeper;
    const c10::StorageImpl* storage;
    int64_t argument;
  };

  void add(const at::Tensor& tensor, int64_t argument) {
    const auto keeper = memory::SlabView::keeper_of(tensor);
    if (keeper.on_use != nullptr) {
      found_.push_back({keeper, tensor.storage().unsafeGetStorageImpl(), argument});
    }
  }

  void add(const c10::IValue& value, int64_t argument) {
    if (value.isTensor()) {
      add(value.toTensor(), argument);
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor()) {
          add(item.toTensor(), argument);
        } else if (!item.isNone()) { // left out among tensors, as of an index
          break;
        }
      }
    }
  }

  c10::SmallVector<Input, 4> found_;
};

// Operations that this thread runs meanwhile are not looked at.
thread_local bool looks_away = false;

// An operation that did not find what it reads, until it has ended, by raising that:
// those that it calls meanwhile ask no more.
struct Failing final : at::ObserverContext {
  Failing() {
    looks_away = true;
  }
  ~Failing() override {
    looks_away = false;
  }
  Failing(const Failing&) = delete;
  Failing& operator=(const Failing&) = delete;
};

std::unique_ptr<at::ObserverContext> before_operation(const at::RecordFunction& function) {
  if (looks_away) {
    return nullptr;
  }
  const Inputs inputs(function);
  if (inputs.empty()) {
    return nullptr;
  }
  looks_away = true; // what answers dispatches nothing on the CPU; elsewhere it may, once
  const bool found = inputs.announce(function);
  looks_away = false;
  return found ? nullptr : std::make_unique<Failing>();
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
