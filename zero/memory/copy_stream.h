#pragma once

// Copies between a device and pinned memory of the host, on a stream of their own: the
// host queues them and goes on, and so does the device's other work.

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/StreamGuard.h>

#include <zero/memory/device_streams.h>

namespace zero::memory {

// Of the host's memory that a device copies from and to by itself.
at::TensorOptions pinned(c10::ScalarType dtype);

// Queues target[target_begin + k] = source[source_begin + k] for k < numel on the current
// stream; both dense, of one dtype, one of them pinned.
void queue_copy(
    const at::Tensor& target,
    int64_t target_begin,
    const at::Tensor& source,
    int64_t source_begin,
    int64_t numel);

class CopyStream {
 public:
  // While the guard lives this stream is the current one. It comes after what the current
  // stream has so far.
  c10::StreamGuard enter(c10::Device device);

 private:
  std::optional<c10::Stream> stream_; // of the first device that came
  Moment begin_;
};

} // namespace zero::memory
