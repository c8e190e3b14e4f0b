#include <zero/memory/flat_buffer.h>

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <zero/memory/device_streams.h>

namespace zero::memory {
namespace {

// Larger buffers are mapped: zeroed pages that go back to the system when they are
// freed, whatever the heap around them looks like.
constexpr int64_t kMapped = int64_t{1} << 18;
// Those are filled from end to end: huge pages cost no memory and fault seldom.
constexpr int64_t kHuge = int64_t{1} << 22;

struct Mapping {
  void* data;
  size_t bytes;
};

void unmap(void* context) {
  const std::unique_ptr<Mapping> mapping(static_cast<Mapping*>(context));
  munmap(mapping->data, mapping->bytes);
}

c10::Storage map_storage(int64_t bytes) {
  void* data = mmap(
      nullptr,
      static_cast<size_t>(bytes),
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS,
      -1,
      0);
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      data != MAP_FAILED, // NOLINT(performance-no-int-to-ptr)
      "[zero.memory] expected ",
      bytes,
      " bytes of memory, got: ",
      std::strerror(errno));
#ifdef MADV_HUGEPAGE
  if (bytes >= kHuge) {
    madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  }
#endif
  auto* mapping = new Mapping{data, static_cast<size_t>(bytes)};
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      static_cast<size_t>(bytes),
      c10::DataPtr(data, mapping, &unmap, at::kCPU),
      /*allocator=*/nullptr,
      /*resizable=*/false);
}

c10::Storage allocate_storage(int64_t bytes) {
  c10::Allocator* allocator = c10::GetCPUAllocator();
  auto data = allocator->allocate(static_cast<size_t>(bytes));
  if (bytes > 0) {
    std::memset(data.get(), 0, static_cast<size_t>(bytes));
  }
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      static_cast<size_t>(bytes),
      std::move(data),
      allocator,
      /*resizable=*/true);
}

at::Tensor zeros_on_device(int64_t numel, const at::TensorOptions& options, BufferSource* source) {
  const Quiet quiet;
  const auto bytes = numel * static_cast<int64_t>(options.dtype().itemsize());
  const c10::Storage storage = bytes >= kMapped && source != nullptr
      ? source->allocate_on(options.device(), bytes)
      : c10::Storage();
  if (storage) {
    return tensor_over(storage, {numel}, {1}, options).zero_();
  }
  return at::zeros({numel}, options.requires_grad(false));
}

// The stream that memory came from may use it again at once: what this thread's stream
// still does with it comes before.
void hand_back(const c10::Stream& home) noexcept {
  try {
    const c10::Stream here = current_stream(home.device());
    if (here != home) {
      c10::Event event(home.device_type());
      event.record(here);
      event.block(home);
    }
  } catch (...) { // NOLINT(bugprone-empty-catch): the device is gone, at the end of the process
  }
}

at::Tensor pinned_zeros(int64_t numel, const at::TensorOptions& options) {
  const Quiet quiet;
  const at::Tensor tensor = at::empty({numel}, options.requires_grad(false));
  if (numel > 0) {
    std::memset(tensor.mutable_data_ptr(), 0, tensor.nbytes());
  }
  return tensor;
}

// Dispatches nothing in the CPU's ordinary memory: the caller may be in any mode.
at::Tensor zeros(int64_t numel, const at::TensorOptions& options, BufferSource* source) {
  if (!options.device().is_cpu()) {
    return zeros_on_device(numel, options, source);
  }
  if (options.pinned_memory()) {
    return pinned_zeros(numel, options);
  }
  const auto bytes = numel * static_cast<int64_t>(options.dtype().itemsize());
  c10::Storage storage;
  if (bytes >= kMapped && source != nullptr) {
    storage = source->allocate(bytes);
  }
  if (!storage) {
    storage = bytes >= kMapped ? map_storage(bytes) : allocate_storage(bytes);
  }
  return tensor_over(storage, {numel}, {1}, options);
}

} // namespace

FlatBuffer::FlatBuffer(
    int64_t numel,
    const at::TensorOptions& options,
    Purpose purpose,
    std::shared_ptr<Account> account,
    BufferSource* source)
    : purpose_(purpose), account_(std::move(account)) {
  // A buffer made under inference_mode would be useless to later training.
  const c10::InferenceMode normal(false);
  tensor_ = zeros(numel, options, source);
  if (!tensor_.is_cpu()) {
    home_ = current_stream(tensor_.device());
  }
  account_->add(purpose_, static_cast<int64_t>(tensor_.nbytes()));
}

FlatBuffer::FlatBuffer(FlatBuffer&& other) noexcept
    : tensor_(std::move(other.tensor_)),
      purpose_(other.purpose_),
      account_(std::move(other.account_)),
      home_(other.home_) {}

FlatBuffer& FlatBuffer::operator=(FlatBuffer&& other) noexcept {
  std::swap(tensor_, other.tensor_);
  std::swap(purpose_, other.purpose_);
  std::swap(account_, other.account_);
  std::swap(home_, other.home_);
  return *this;
}

FlatBuffer::~FlatBuffer() {
  if (tensor_.defined() && account_) {
    account_->add(purpose_, -static_cast<int64_t>(tensor_.nbytes()));
    if (home_) {
      hand_back(*home_);
    }
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
  at::Tensor view = tensor_over(dense.storage(), {numel}, {1}, dense.options());
  view.unsafeGetTensorImpl()->set_storage_offset(dense.storage_offset() + begin);
  return view;
}

} // namespace zero::memory
