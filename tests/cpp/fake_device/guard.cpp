// What torch asks of a device: the current device and streams of a thread, events, hooks.

#include <array>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <torch/library.h>

#include "machine.h"

namespace zero::fake {
namespace {

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, device_count> this_streams{};

c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device(index), id);
}

EventState& event_of(void* event) {
  return *static_cast<EventState*>(event);
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::DeviceType::PrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    const auto from = getDevice();
    setDevice(to);
    return from;
  }
  c10::Device getDevice() const override {
    return device(this_device);
  }
  void setDevice(c10::Device to) const override {
    if (to.has_index()) {
      set_current_device(to.index());
    }
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    this_device = to.has_index() ? to.index() : this_device;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count;
  }

  c10::Stream getStream(c10::Device of) const override {
    const auto index = resolve(of.index());
    return stream_of(index, this_streams.at(index));
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return stream_of(resolve(of.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool high_priority) const override {
    return new_stream(of.index(), high_priority);
  }
  c10::Stream getNewStream(c10::Device of, int priority) const override {
    return new_stream(of.index(), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const auto index = to.device_index();
    return stream_of(index, exchange_current_stream(index, to.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    auto& machine = Machine::get();
    const auto lock = machine.lock();
    return &machine.stream_locked(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& machine = Machine::get();
    const auto lock = machine.lock();
    auto& state = machine.stream_locked(stream);
    const bool done = Machine::is_done(state.pending);
    if (done) {
      machine.host_knows_locked(state.device, {state.clock, {}, -1});
    }
    return done;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    auto& machine = Machine::get();
    auto lock = machine.lock();
    auto& state = machine.stream_locked(stream);
    const Point point{state.clock, state.pending, -1};
    machine.synchronize_locked(lock, state.device, point, "synchronizeStream", -1, state.id);
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    auto& machine = Machine::get();
    auto lock = machine.lock();
    const auto point = machine.device_point_locked(resolve(index));
    machine.synchronize_locked(lock, resolve(index), point, "synchronizeDevice");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const bool ours = data.get_deleter() == device_allocator()->raw_deleter();
    Machine::get().record_stream(static_cast<const char*>(data.get()), stream, ours);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag)
      const override {
    auto& machine = Machine::get();
    const auto lock = machine.lock();
    if (*event == nullptr) {
      *event = machine.new_event_locked();
    }
    auto& state = event_of(*event);
    state.device = stream.device_index();
    state.point = machine.point_locked(machine.stream_locked(stream), state.id);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) {
      return; // never recorded
    }
    auto& machine = Machine::get();
    const auto lock = machine.lock();
    const auto& state = event_of(event);
    machine.wait_locked(machine.stream_locked(stream), state.point, state.id);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    auto& machine = Machine::get();
    const auto lock = machine.lock();
    const auto& state = event_of(event);
    const bool done = Machine::is_done(state.point.pending);
    if (done) {
      machine.host_knows_locked(state.device, state.point);
    }
    return done;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) {
      return;
    }
    auto& machine = Machine::get();
    auto lock = machine.lock();
    const auto state = event_of(event);
    machine.synchronize_locked(lock, state.device, state.point, "synchronizeEvent", state.id);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_current_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return this_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = this_device;
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  // Random operators are the CPU's, and draw from its generator.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  bool isPinnedPtr(const void* data) const override {
    return Machine::get().is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

const int registered = [] {
  c10::register_privateuse1_backend("fake");
  c10::SetAllocator(c10::DeviceType::PrivateUse1, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return 0;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace

c10::DeviceIndex current_device() {
  return this_device;
}

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < device_count,
      "expected a fake device from 0 to ",
      device_count - 1,
      ", got ",
      int(index));
  this_device = index;
}

c10::DeviceIndex resolve(c10::DeviceIndex index) {
  return index < 0 ? this_device : index;
}

c10::StreamId exchange_current_stream(c10::DeviceIndex index, c10::StreamId stream) {
  return std::exchange(this_streams.at(resolve(index)), stream);
}

c10::Stream current_stream(c10::DeviceIndex index) {
  return stream_of(resolve(index), this_streams.at(resolve(index)));
}

c10::Stream new_stream(c10::DeviceIndex index, bool high_priority) {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  return stream_of(resolve(index), machine.new_stream_locked(resolve(index), high_priority).id);
}

} // namespace zero::fake
