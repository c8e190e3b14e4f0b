#include <zero/memory/device_streams.h>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace zero::memory {
namespace {

// Keys that a caller's modes put before the device's own.
const c10::DispatchKeySet& modes() {
  static const c10::DispatchKeySet keys = c10::python_ks | c10::functorch_transforms_ks |
      c10::autocast_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::Functionalize) |
      c10::DispatchKeySet(c10::DispatchKey::PythonDispatcher) |
      c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot);
  return keys;
}

} // namespace

Quiet::Quiet() : exclude_(modes()) {}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void* current_handle(c10::Device device) {
  return current_stream(device).native_handle();
}

c10::Stream high_priority_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

c10::Stream pool_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/false);
}

void Moment::record(c10::Device device) {
  if (device.is_cpu()) {
    return;
  }
  if (events_.empty()) {
    events_.emplace_back(device.type());
  }
  events_.front().record(current_stream(device));
}

void Moment::wait() const {
  if (!events_.empty()) {
    c10::Event& event = events_.front();
    event.block(current_stream(event.device()));
  }
}

void Moment::hold(const c10::Stream& stream) const {
  if (!events_.empty()) {
    events_.front().block(stream);
  }
}

void Moment::finish() const {
  if (!events_.empty()) {
    events_.front().synchronize();
  }
}

} // namespace zero::memory
