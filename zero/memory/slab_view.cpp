#include <zero/memory/slab_view.h>

#include <atomic>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <c10/core/StorageImpl.h>

#include <zero/memory/flat_buffer.h>

namespace zero::memory {
namespace {

// Its address marks the storages that are closed: the guard's test is one
// comparison, without a table or a lock.
void closed_marker(void* /*on_use*/) {}

c10::StorageImpl* impl_of(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl();
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

// What the pointers of open storages own together.
struct SlabView::Source::Hold {
  c10::Storage slab;
  OnUse* on_use;
  char* data;
  int64_t itemsize;
  std::atomic<int64_t> owners = 1;
};

SlabView::Source::Source(const at::Tensor& slab, OnUse* on_use)
    : hold_(new Hold{
          slab.storage(),
          on_use,
          static_cast<char*>(slab.mutable_data_ptr()),
          static_cast<int64_t>(slab.itemsize())}) {}

SlabView::Source::~Source() {
  drop(hold_);
}

void SlabView::Source::drop(void* hold) {
  auto* dropped = static_cast<Hold*>(hold);
  if (dropped->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    delete dropped;
  }
}

c10::DataPtr SlabView::Source::at(int64_t offset) const {
  hold_->owners.fetch_add(1, std::memory_order_relaxed);
  return {hold_->data + offset * hold_->itemsize, hold_, &drop, hold_->slab.device()};
}

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
    impl_of(view.storage_)->set_data_ptr_noswap(Source(slab).at(offset));
    return view;
  }
  return replace(tensor, slab, offset);
}

SlabView SlabView::replace(at::Tensor& tensor, const at::Tensor& slab, int64_t offset) {
  SlabView view;
  view.storage_ =
      empty_storage(static_cast<int64_t>(tensor.numel() * slab.itemsize()), slab.device());
  impl_of(view.storage_)->set_data_ptr_noswap(Source(slab).at(offset));
  at::Tensor gradient = std::move(tensor.mutable_grad());
  tensor.mutable_grad().reset();
  tensor.set_data(tensor_over(
      view.storage_, tensor.sizes(), tensor.strides(), tensor.options().dtype(slab.dtype())));
  if (gradient.defined()) {
    tensor.mutable_grad() = gradient.to(tensor.scalar_type());
  }
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

void SlabView::point_to(const at::Tensor& slab, int64_t offset, OnUse* on_use) {
  point_to(Source(slab, on_use), offset);
}

void SlabView::point_to(const Source& source, int64_t offset) {
  if (closed_) {
    impl_of(storage_)->clear_data_ptr_access_error_msg_();
    closed_ = false;
    parked_.clear();
  }
  impl_of(storage_)->set_data_ptr_noswap(source.at(offset));
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

void SlabView::release(std::string message, OnUse* on_use) {
  c10::StorageImpl* storage = impl_of(storage_);
  storage->set_data_ptr_noswap({nullptr, on_use, &closed_marker, storage->device()});
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
  parked_.clear();
  closed_ = true;
}

void SlabView::set_message(std::string message) {
  impl_of(storage_)->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

// numpy() leaves its mark on storages that could be resized.
bool SlabView::take_lent() {
  c10::StorageImpl* storage = impl_of(storage_);
  if (storage->resizable() || storage->allocator() == nullptr) {
    return false;
  }
  storage->set_resizable(true);
  return true;
}

bool SlabView::holds(const at::Tensor& tensor) const {
  return tensor.has_storage() && impl_of(tensor.storage()) == impl_of(storage_);
}

bool SlabView::is(const c10::StorageImpl* storage) const {
  return impl_of(storage_) == storage;
}

void SlabView::take_back(at::Tensor& tensor, const at::Tensor& slab, int64_t offset) {
  const at::NoGradGuard no_grad;
  const at::Tensor home =
      at::as_strided(slab, tensor.sizes(), tensor.strides(), slab.storage_offset() + offset);
  home.copy_(tensor.detach());
  take_back(tensor);
}

void SlabView::take_back(at::Tensor& tensor) {
  tensor.set_data(tensor_over(storage_, tensor.sizes(), tensor.strides(), tensor.options()));
}

SlabView::Keeper SlabView::keeper_of(const at::Tensor& tensor) noexcept {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) {
    return {};
  }
  const c10::DataPtr& data =
      impl_of(tensor.unsafeGetTensorImpl()->unsafe_storage())->_mutable_data_ptr_no_checks();
  if (data.get_deleter() == &closed_marker) {
    return {static_cast<OnUse*>(data.get_context()), true};
  }
  if (data.get_deleter() == &Source::drop) {
    return {static_cast<Source::Hold*>(data.get_context())->on_use, false};
  }
  return {};
}

} // namespace zero::memory
