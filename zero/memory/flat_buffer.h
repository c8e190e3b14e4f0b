#pragma once

// Owned, accounted, one-dimensional memory.

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <zero/api.h>
#include <zero/memory/account.h>
#include <zero/memory/buffer_source.h>
#include <zero/memory/elements.h>

namespace zero::memory {

class ZERO_API FlatBuffer {
 public:
  FlatBuffer() = default;
  // `numel` elements, zeroed. Large ones come from `source`, where it has them.
  FlatBuffer(
      int64_t numel,
      const at::TensorOptions& options,
      Purpose purpose,
      std::shared_ptr<Account> account,
      BufferSource* source = nullptr);
  FlatBuffer(FlatBuffer&& other) noexcept;
  FlatBuffer& operator=(FlatBuffer&& other) noexcept;
  FlatBuffer(const FlatBuffer&) = delete;
  FlatBuffer& operator=(const FlatBuffer&) = delete;
  ~FlatBuffer();

  explicit operator bool() const {
    return tensor_.defined();
  }
  const at::Tensor& tensor() const {
    return tensor_;
  }
  // Elements [begin, begin + numel), as a tensor that shares the memory.
  at::Tensor view(int64_t begin, int64_t numel) const;

 private:
  at::Tensor tensor_;
  Purpose purpose_ = Purpose::buffers;
  std::shared_ptr<Account> account_;
  std::optional<c10::Stream> home_; // on a device: whose memory it is
};

// A tensor over a storage's first bytes, without dispatch; not a view for
// autograd.
at::Tensor tensor_over(
    const c10::Storage& storage,
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    const at::TensorOptions& options);

// One-dimensional tensor over elements [begin, begin + numel) of a dense one, in
// the order of its memory.
at::Tensor flat_view(const at::Tensor& dense, int64_t begin, int64_t numel);

} // namespace zero::memory
