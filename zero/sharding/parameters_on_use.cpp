// ParameterManager's answers to operations that are about to touch a parameter.

#include <zero/sharding/parameters.h>

#include <unistd.h>

#include <c10/core/GradMode.h>

#include <zero/comm/blocking.h>
#include <zero/comm/error_text.h>

namespace zero::sharding {

bool ParameterManager::gathers_now(bool backward) const {
  return always_ || backward || depth_ > 0 || c10::GradMode::is_enabled();
}

bool ParameterManager::Unit::before_use(const char* operation) noexcept {
  if (getpid() != manager_.process_) {
    return true; // the operation raises the view's own message
  }
  const bool backward = manager_.inside_backward_();
  if (!manager_.gathers_now(backward)) {
    return true;
  }
  const comm::BlockingScope blocking;
  std::string cause;
  try {
    manager_.before_use_();
    const std::lock_guard lock(manager_.mutex_);
    manager_.use(index_, backward);
    return true;
  } catch (...) {
    cause = comm::text_of(std::current_exception());
  }
  const std::lock_guard lock(manager_.mutex_);
  manager_.fail(index_, operation, cause);
  return false;
}

// A unit that was still whole is used: what comes after it is expected to do so
// again, and to find it whole.
void ParameterManager::Unit::while_open() noexcept {
  if (manager_.last_used_.load(std::memory_order_relaxed) == index_ || held > 0) {
    return;
  }
  before_use("an operation");
}

void ParameterManager::Unit::before_write(
    const c10::StorageImpl* storage,
    const char* operation) noexcept {
  {
    const comm::BlockingScope blocking;
    const std::lock_guard lock(manager_.mutex_);
    if (writable == 0) {
      manager_.refuse_write(index_, storage, operation);
      return;
    }
  }
  if (state != State::whole) {
    before_use(operation);
  }
}

void ParameterManager::fail(
    int64_t unit,
    const char* operation,
    const std::string& cause) noexcept {
  each_parameter(unit, [&](int64_t index) {
    memory::SlabView& view = table_.entry(index).view;
    if (view.closed()) {
      view.set_message(
          "[zero.sharding] gathering parameter '" + table_.entry(index).parameter.name + "' for " +
          operation + " failed: " + cause);
    }
  });
}

// The operation finds no data to write to. The next reader gets it back.
void ParameterManager::refuse_write(
    int64_t unit,
    const c10::StorageImpl* storage,
    const char* operation) noexcept {
  each_parameter(unit, [&](int64_t index) {
    memory::SlabView& view = table_.entry(index).view;
    if (view.is(storage)) {
      view.release(
          table_.sharded(index) + ", so that " + operation +
              " would be lost; change it inside zero.gathered(..., writeback=True)",
          units_[unit].get());
    }
  });
}

} // namespace zero::sharding
