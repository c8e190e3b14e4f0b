#include <zero/memory/flat_buffer.h>

#include <cstring>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/zeros.h>

namespace zero::memory {

FlatBuffer::FlatBuffer(
    int64_t numel,
    const at::TensorOptions& options,
    Purpose purpose,
    std::shared_ptr<Account> account)
    : purpose_(purpose), account_(std::move(account)) {
  // A buffer made under inference_mode would be useless to later training.
  const c10::InferenceMode normal(false);
  tensor_ = at::zeros({numel}, options.requires_grad(false));
  account_->add(purpose_, static_cast<int64_t>(tensor_.nbytes()));
}

FlatBuffer::FlatBuffer(FlatBuffer&& other) noexcept
    : tensor_(std::move(other.tensor_)),
      purpose_(other.purpose_),
      account_(std::move(other.account_)) {}

FlatBuffer& FlatBuffer::operator=(FlatBuffer&& other) noexcept {
  std::swap(tensor_, other.tensor_);
  std::swap(purpose_, other.purpose_);
  std::swap(account_, other.account_);
  return *this;
}

FlatBuffer::~FlatBuffer() {
  if (tensor_.defined() && account_) {
    account_->add(purpose_, -static_cast<int64_t>(tensor_.nbytes()));
  }
}

at::Tensor FlatBuffer::view(int64_t begin, int64_t numel) const {
  return flat_view(tensor_, begin, numel);
}

at::Tensor tensor_over(
    const c10::Storage& storage,
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    const at::TensorOptions& options) {
  const c10::InferenceMode normal(false);
  const auto key = options.device().is_cpu() ? c10::DispatchKey::CPU : options.computeDispatchKey();
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), options.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

at::Tensor flat_view(const at::Tensor& dense, int64_t begin, int64_t numel) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal(false);
  return at::as_strided(dense.detach(), {numel}, {1}, dense.storage_offset() + begin);
}

void* element(const at::Tensor& dense, int64_t index) {
  return static_cast<char*>(dense.mutable_data_ptr()) + index * dense.itemsize();
}

void zero_elements(const at::Tensor& dense, int64_t begin, int64_t numel) {
  if (numel == 0) {
    return;
  }
  if (dense.is_cpu()) {
    std::memset(element(dense, begin), 0, numel * dense.itemsize());
  } else {
    flat_view(dense, begin, numel).zero_();
  }
}

void copy_elements(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel) {
  if (numel == 0) {
    return;
  }
  if (target.is_cpu() && source.is_cpu()) {
    std::memmove(
        element(target, target_begin), element(source, source_begin), numel * target.itemsize());
  } else {
    flat_view(target, target_begin, numel).copy_(flat_view(source, source_begin, numel));
  }
}

} // namespace zero::memory
