// The operators that are not the CPU's kernels over the same memory: those that allocate,
// copy between devices, read on the host, or have composite kernels that would be taken
// before the fallback.

#include <cstring>
#include <set>
#include <string>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "fallback.h"
#include "machine.h"

#include <ATen/native/transformers/attention.h>

namespace zero::fake {

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  if (bytes == storage.nbytes()) {
    return;
  }
  const c10::DeviceGuard guard(storage.device());
  auto data = device_allocator()->allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    auto& machine = Machine::get();
    auto lock = machine.lock();
    const char* from = static_cast<const char*>(storage.data());
    const char* to = static_cast<const char*>(data.get());
    machine.launch_locked(
        lock, machine.stream_locked(current_stream()), "resize", {{{from, kept}}, {{to, kept}}});
    std::memcpy(data.get(), from, kept);
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

Range range_of(const at::TensorBase& tensor) {
  if (tensor.numel() == 0 || !tensor.has_storage()) {
    return {};
  }
  const auto* data = static_cast<const char*>(tensor.storage().data());
  if (data == nullptr) {
    return {};
  }
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const auto item = static_cast<int64_t>(tensor.itemsize());
  return {data + tensor.storage_offset() * item, static_cast<size_t>((last + 1) * item)};
}

namespace {

constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

c10::Device device_or_current(std::optional<c10::Device> given) {
  return device(resolve(given ? given->index() : -1));
}

// ---- allocation ----

at::Tensor empty_memory_format(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<c10::Device> on,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(on));
  return at::detail::empty_generic(
      size, device_allocator(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<c10::Device> on,
    std::optional<bool>) {
  const c10::DeviceGuard guard(device_or_current(on));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), keys, c10::dtype_or_default(dtype));
}

const at::Tensor&
resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto count = c10::multiply_integers(size) + self.storage_offset();
  const size_t bytes = static_cast<size_t>(count) * self.itemsize();
  auto& storage = *impl->unsafe_storage().unsafeGetStorageImpl();
  if (bytes > storage.nbytes()) {
    resize_storage(storage, bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage_offset(
    at::Tensor& self,
    c10::Storage storage,
    int64_t offset,
    c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(storage), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      0,
      c10::DataPtr(nullptr, self.device()),
      device_allocator(),
      /*resizable=*/true);
  return set_storage_offset(self, std::move(storage), 0, {0}, {1});
}

// ---- copies and reads ----

at::Tensor cpu_twin(const at::Tensor& tensor) {
  if (!is_fake(tensor)) {
    return tensor;
  }
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      tensor.storage().nbytes(),
      c10::DataPtr(const_cast<void*>(tensor.storage().data()), c10::Device(c10::kCPU)));
  auto twin = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = twin.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return twin;
}

const char* name_of_copy(const at::Tensor& from, const at::Tensor& to) {
  if (is_fake(from) && is_fake(to)) {
    return "copy_";
  }
  return is_fake(from) ? "copy to host" : "copy to device";
}

// As CUDA: a copy waits on the host unless it is non_blocking; one to pageable memory
// waits always, and one from it has read the source when it returns.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below;
  auto& machine = Machine::get();
  const auto index = is_fake(dst) ? dst.device().index() : self.device().index();
  const c10::DeviceGuard guard(device(index));
  const bool between = !is_fake(self) || !is_fake(dst);
  const at::Tensor& host = is_fake(self) ? dst : self;
  const bool pinned = between && machine.is_pinned(host.storage().data());
  Ranges ranges;
  if (is_fake(self) || (pinned && non_blocking)) {
    ranges.reads.push_back(range_of(self));
  }
  if (is_fake(dst) || (pinned && non_blocking)) {
    ranges.writes.push_back(range_of(dst));
  }
  const std::string name = name_of_copy(self, dst);
  const bool waits = between && (!non_blocking || (!pinned && is_fake(self)));
  {
    auto lock = machine.lock();
    if (waits) {
      machine.refuse_synchronization_locked(
          index, name + (non_blocking ? " (pageable memory)" : " (not non_blocking)"));
    }
    auto& stream = machine.stream_locked(current_stream(index));
    machine.launch_locked(lock, stream, name, ranges);
    if (waits) {
      const Point point{stream.clock, stream.pending, -1};
      machine.synchronize_locked(lock, index, point, name, -1, stream.id);
    }
  }
  cpu_twin(dst).copy_(cpu_twin(self));
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) {
    dst.resize_(self.sizes());
  }
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const at::AutoDispatchBelowADInplaceOrView below;
  auto& machine = Machine::get();
  {
    auto lock = machine.lock();
    const auto index = self.device().index();
    const std::string name = "_local_scalar_dense";
    machine.refuse_synchronization_locked(index, name + " (item)");
    auto& stream = machine.stream_locked(current_stream(index));
    machine.launch_locked(lock, stream, name, {{range_of(self)}, {}});
    machine.synchronize_locked(
        lock, index, {stream.clock, stream.pending, -1}, name, -1, stream.id);
  }
  return at::_local_scalar_dense(cpu_twin(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  const c10::DataPtr& data = self.storage().data_ptr();
  c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)->recordDataPtrOnStream(data, stream);
}

int64_t choose_math_attention(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

// Names of the operators above.
std::set<std::string>& own() {
  static std::set<std::string> names;
  return names;
}

torch::CppFunction fallback() {
  return torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>();
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(fallback());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  const auto impl = [&](const char* name, auto&& kernel) {
    m.impl(name, std::forward<decltype(kernel)>(kernel));
    own().insert(std::string("aten::") + name);
  };
  impl("empty.memory_format", TORCH_FN(empty_memory_format));
  impl("empty_strided", TORCH_FN(empty_strided));
  impl("resize_", TORCH_FN(resize_));
  impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  impl("set_.source_Storage", TORCH_FN(set_storage));
  impl("set_.source_Tensor", TORCH_FN(set_tensor));
  impl("set_", TORCH_FN(set_nothing));
  impl("_copy_from", TORCH_FN(copy_from));
  impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  impl("record_stream", TORCH_FN(record_stream));
  // Where the CPU has a kernel of its own it comes before kernels for all backends, which
  // round differently.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    const auto text = c10::toString(name);
    if (name.name.starts_with("aten::") && op && own().count(text) == 0 &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      m.impl(text.c_str(), fallback());
    }
  }
}

} // namespace zero::fake

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &zero::fake::choose_math_attention)
} // namespace at::native
