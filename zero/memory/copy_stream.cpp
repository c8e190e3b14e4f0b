#include <zero/memory/copy_stream.h>

#include <zero/memory/flat_buffer.h>

namespace zero::memory {

at::TensorOptions pinned(c10::ScalarType dtype) {
  return at::TensorOptions().dtype(dtype).device(at::kCPU).pinned_memory(true);
}

void queue_copy(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel) {
  if (numel > 0) {
    const Quiet quiet;
    flat_view(target, target_begin, numel)
        .copy_(flat_view(source, source_begin, numel), /*non_blocking=*/true);
  }
}

c10::StreamGuard CopyStream::enter(c10::Device device) {
  if (!stream_) {
    stream_ = pool_stream(device);
  }
  begin_.record(device);
  begin_.hold(*stream_);
  return c10::StreamGuard(*stream_);
}

} // namespace zero::memory
