#pragma once

// What work on a device is queued on, whatever the device: the library names no
// vendor's streams.

#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace zero::memory {

// Operations inside are the device's own: no autograd, no mode of the caller's
// (functorch, Python dispatch, autocast) sees them.
class Quiet {
 public:
  Quiet();

 private:
  at::AutoDispatchBelowADInplaceOrView below_;
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

// The stream that this thread queues work of the device on.
c10::Stream current_stream(c10::Device device);
// The same, as kernels::DeviceKernels take it.
void* current_handle(c10::Device device);
// Of the device's pools.
c10::Stream high_priority_stream(c10::Device device);
c10::Stream pool_stream(c10::Device device);

// A moment in a stream. On the CPU, where work is done when its call returns, nothing.
class Moment {
 public:
  // Now, in the current stream; what it was before is forgotten.
  void record(c10::Device device);
  // What is queued on the current stream from here on comes after it. Blocks nobody.
  void wait() const;
  // The same of another stream.
  void hold(const c10::Stream& stream) const;
  // The host waits until the device has come there.
  void finish() const;
  bool recorded() const {
    return !events_.empty();
  }
  // Whether the device has come there.
  bool passed() const {
    return events_.empty() || events_.front().query();
  }

 private:
  mutable std::vector<c10::Event> events_; // one or none
};

} // namespace zero::memory
