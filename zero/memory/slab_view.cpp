#include <zero/memory/slab_view.h>

#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <c10/core/StorageImpl.h>

namespace zero::memory {
namespace {

void drop_slab(void* context) {
  delete static_cast<c10::Storage*>(context);
}

// Its address marks the storages that are closed: the guard's test is one
// comparison, without a table or a lock.
void closed_marker(void* /*on_use*/) {}

c10::DataPtr pointer_into(const at::Tensor& slab, int64_t offset) {
  auto* keep = new c10::Storage(slab.storage());
  void* data = static_cast<char*>(slab.mutable_data_ptr()) + offset * slab.itemsize();
  return {data, keep, &drop_slab, slab.device()};
}

c10::StorageImpl* impl_of(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl();
}

at::Tensor tensor_over(
    const c10::Storage& storage,
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    const at::TensorOptions& options) {
  const auto key = options.device().is_cpu() ? c10::DispatchKey::CPU : options.computeDispatchKey();
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), options.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

c10::Storage empty_storage(int64_t bytes, c10::Device device) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      static_cast<size_t>(bytes),
      c10::DataPtr(nullptr, device),
      /*allocator=*/nullptr,
      /*resizable=*/false);
}

} // namespace

SlabView& SlabView::operator=(SlabView&& other) noexcept {
  std::swap(storage_, other.storage_);
  std::swap(parked_, other.parked_);
  std::swap(closed_, other.closed_);
  return *this;
}

SlabView::~SlabView() {
  if (closed_ && parked_.get() != nullptr) {
    open();
  }
}

SlabView
SlabView::adopt(at::Tensor& tensor, const at::Tensor& slab, int64_t offset, bool own_storage) {
  const at::NoGradGuard no_grad;
  tensor.mutable_data_ptr(); // a lazily copied storage becomes a plain one
  at::as_strided(slab, tensor.sizes(), tensor.strides(), slab.storage_offset() + offset)
      .copy_(tensor.detach());
  SlabView view;
  if (own_storage) {
    view.storage_ = tensor.storage();
    impl_of(view.storage_)->set_data_ptr_noswap(pointer_into(slab, offset));
    return view;
  }
  view.storage_ =
      empty_storage(static_cast<int64_t>(tensor.numel() * tensor.itemsize()), slab.device());
  impl_of(view.storage_)->set_data_ptr_noswap(pointer_into(slab, offset));
  tensor.set_data(tensor_over(view.storage_, tensor.sizes(), tensor.strides(), tensor.options()));
  return view;
}

std::pair<at::Tensor, SlabView>
SlabView::make(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options) {
  int64_t numel = 1;
  for (const int64_t size : sizes) {
    numel *= size;
  }
  const auto bytes = numel * static_cast<int64_t>(options.dtype().itemsize());
  SlabView view;
  view.storage_ = empty_storage(bytes, options.device());
  return {tensor_over(view.storage_, sizes, strides, options), std::move(view)};
}

void SlabView::point_to(const at::Tensor& slab, int64_t offset) {
  if (closed_) {
    impl_of(storage_)->clear_data_ptr_access_error_msg_();
    closed_ = false;
    parked_.clear();
  }
  impl_of(storage_)->set_data_ptr_noswap(pointer_into(slab, offset));
}

void SlabView::close(std::string message, OnUse* on_use) {
  c10::StorageImpl* storage = impl_of(storage_);
  const c10::Device device = storage->device();
  parked_ = std::move(storage->_mutable_data_ptr_no_checks());
  storage->set_data_ptr_noswap({nullptr, on_use, &closed_marker, device});
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
  closed_ = true;
}

void SlabView::open() {
  c10::StorageImpl* storage = impl_of(storage_);
  storage->clear_data_ptr_access_error_msg_();
  storage->set_data_ptr_noswap(std::move(parked_));
  parked_.clear();
  closed_ = false;
}

void SlabView::release(std::string message) {
  if (!closed_) {
    close(std::move(message), nullptr);
  } else {
    set_message(std::move(message));
  }
  parked_.clear();
}

void SlabView::set_message(std::string message) {
  impl_of(storage_)->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

bool SlabView::holds(const at::Tensor& tensor) const {
  return tensor.has_storage() && impl_of(tensor.storage()) == impl_of(storage_);
}

void SlabView::take_back(at::Tensor& tensor, const at::Tensor& slab, int64_t offset) {
  const at::NoGradGuard no_grad;
  const at::Tensor home =
      at::as_strided(slab, tensor.sizes(), tensor.strides(), slab.storage_offset() + offset);
  home.copy_(tensor.detach());
  tensor.set_data(tensor_over(storage_, tensor.sizes(), tensor.strides(), tensor.options()));
}

OnUse* SlabView::closed_by(const at::Tensor& tensor) noexcept {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) {
    return nullptr;
  }
  const c10::DataPtr& data =
      impl_of(tensor.unsafeGetTensorImpl()->unsafe_storage())->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &closed_marker ? static_cast<OnUse*>(data.get_context()) : nullptr;
}

} // namespace zero::memory
