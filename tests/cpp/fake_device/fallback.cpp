#include "fallback.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorImpl.h>

#include "machine.h"

namespace zero::fake {

bool is_fake(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

namespace {

// Operators whose CUDA kernels read a number on the host.
bool synchronizes(const std::string& name) {
  static const std::unordered_set<std::string> names{
      "aten::equal",
      "aten::nonzero",
      "aten::masked_select",
      "aten::_unique2",
      "aten::unique_dim",
      "aten::unique_consecutive",
      "aten::repeat_interleave",
      "aten::is_set_to"};
  return names.count(name) > 0;
}

struct Argument {
  at::Tensor fake;
  at::Tensor cpu;
  bool written;
};

// The arguments of one call, and their CPU twins.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    const auto& schema = op_.schema();
    const size_t count = schema.arguments().size();
    const auto original = torch::jit::last(*stack_, count).vec();
    for (size_t i = 0; i < count; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      auto& slot = (*stack_)[stack_->size() - count + i];
      slot = to_cpu(slot, alias != nullptr && alias->isWrite());
    }
    const c10::DeviceGuard guard(device(device_.value_or(current_device())));
    const at::AutoDispatchBelowADInplaceOrView below;
    launch();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    resize_outputs();
    results(original);
  }

 private:
  bool makes_views() const {
    for (const auto& result : op_.schema().returns()) {
      if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
        return true;
      }
    }
    return false;
  }

  // ---- arguments ----
  c10::IValue to_cpu(const c10::IValue& value, bool written) {
    if (value.isTensor()) {
      return twin(value.toTensor(), written);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) {
        list.push_back(twin(tensor, written));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        indexes_by_mask_ |= tensor && tensor->defined() && tensor->scalar_type() == at::kBool;
        list.push_back(tensor ? std::optional(twin(*tensor, written)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) {
      note_device(resolve(value.toDevice().index()));
      return c10::Device(c10::DeviceType::CPU);
    }
    return value;
  }

  void note_device(c10::DeviceIndex index) {
    TORCH_CHECK(
        !device_ || *device_ == index,
        op_.schema().name(),
        ": expected tensors of one device, got devices ",
        int(device_.value_or(-1)),
        " and ",
        int(index));
    device_ = index;
  }

  at::Tensor twin(const at::Tensor& tensor, bool written) {
    if (!is_fake(tensor)) {
      return tensor;
    }
    note_device(tensor.device().index());
    const auto& storage = tensor.storage();
    auto found = storages_.find(storage.unsafeGetStorageImpl());
    if (found == storages_.end()) {
      // A view of what has no data at present is one all the same.
      auto& impl = *storage.unsafeGetStorageImpl();
      void* data =
          makes_views() ? impl._mutable_data_ptr_no_checks().get() : impl.mutable_data_ptr().get();
      c10::Storage over(
          c10::Storage::use_byte_size_t(),
          storage.nbytes(),
          c10::DataPtr(data, c10::Device(c10::DeviceType::CPU)),
          c10::GetCPUAllocator(),
          /*resizable=*/true);
      originals_.emplace(over.unsafeGetStorageImpl(), storage);
      found = storages_.emplace(storage.unsafeGetStorageImpl(), std::move(over)).first;
    }
    at::Tensor cpu = over(tensor, found->second, c10::DispatchKey::CPU);
    arguments_.push_back({tensor, cpu, written});
    return cpu;
  }

  static at::Tensor
  over(const at::Tensor& like, const c10::Storage& storage, c10::DispatchKey key) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_storage_offset(like.storage_offset());
    impl->set_sizes_and_strides(like.sizes(), like.strides());
    if (like.is_conj()) {
      made._set_conj(true);
    }
    if (like.is_neg()) {
      made._set_neg(true);
    }
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
      impl->set_wrapped_number(true);
    }
    return made;
  }

  void launch() {
    if (makes_views()) {
      return;
    }
    Ranges ranges;
    for (const auto& argument : arguments_) {
      (argument.written ? ranges.writes : ranges.reads).push_back(range_of(argument.fake));
      if (argument.written) {
        ranges.reads.push_back(ranges.writes.back());
      }
    }
    auto& machine = Machine::get();
    auto lock = machine.lock();
    auto& stream = machine.stream_locked(current_stream());
    const auto& name = op_.schema().name();
    const auto plain = name.substr(name.find("::") + 2);
    ticket_ = machine.launch_locked(lock, stream, plain, ranges);
    if (synchronizes(name) || indexes_by_mask_) {
      machine.synchronize_locked(
          lock, stream.device, {stream.clock, stream.pending, -1}, plain, -1, stream.id);
    }
  }

  // ---- results ----

  // Where the kernel has resized an out argument.
  void resize_outputs() {
    for (const auto& argument : arguments_) {
      const at::Tensor& cpu = argument.cpu;
      auto* fake = argument.fake.unsafeGetTensorImpl();
      if (!argument.written || (cpu.sizes() == fake->sizes() && cpu.strides() == fake->strides())) {
        continue;
      }
      auto& storage = *fake->unsafe_storage().unsafeGetStorageImpl();
      resize_storage(storage, std::max(storage.nbytes(), cpu.storage().nbytes()));
      fake->set_sizes_and_strides(cpu.sizes(), cpu.strides());
      const Range target = range_of(argument.fake);
      std::memmove(const_cast<char*>(target.begin), range_of(cpu).begin, target.bytes);
      new_outputs_.push_back(target);
    }
  }

  void results(const std::vector<c10::IValue>& original) {
    const auto& schema = op_.schema();
    const size_t count = schema.returns().size();
    for (size_t i = 0; i < count; ++i) {
      auto& slot = (*stack_)[stack_->size() - count + i];
      const auto* alias = schema.returns()[i].alias_info();
      const int argument = alias != nullptr && alias->isWrite() ? argument_of(*alias) : -1;
      slot = argument >= 0 ? original[argument] : to_fake(slot);
    }
    if (ticket_) {
      auto& machine = Machine::get();
      const auto lock = machine.lock();
      machine.add_writes_locked(*ticket_, new_outputs_);
    }
  }

  int argument_of(const c10::AliasInfo& result) const {
    const auto& arguments = op_.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      if (alias != nullptr && alias->isWrite() && alias->beforeSets() == result.beforeSets()) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  c10::IValue to_fake(const c10::IValue& value) {
    if (value.isTensor()) {
      return result(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) {
        list.push_back(result(tensor));
      }
      return list;
    }
    return value;
  }

  at::Tensor result(const at::Tensor& cpu) {
    if (!cpu.defined() || !cpu.device().is_cpu()) {
      return cpu;
    }
    const auto known = originals_.find(cpu.storage().unsafeGetStorageImpl());
    if (known != originals_.end()) {
      return over(cpu, known->second, c10::DispatchKey::PrivateUse1);
    }
    const at::Tensor made = at::detail::empty_strided_generic(
        cpu.sizes(),
        cpu.strides(),
        device_allocator(),
        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        cpu.scalar_type());
    const Range target = range_of(made);
    if (target.bytes > 0) {
      std::memcpy(const_cast<char*>(target.begin), range_of(cpu).begin, target.bytes);
    }
    new_outputs_.push_back(target);
    return made;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::vector<Argument> arguments_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_; // the CPU's, by ours
  std::unordered_map<const c10::StorageImpl*, c10::Storage> originals_; // ours, by the CPU's
  std::vector<Range> new_outputs_;
  std::optional<c10::DeviceIndex> device_;
  bool indexes_by_mask_ = false;
  std::optional<Ticket> ticket_;
};

} // namespace

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

} // namespace zero::fake
