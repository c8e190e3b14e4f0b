// The process-wide hooks of blocking.h. Plain pointers, so that nothing has to be
// destroyed at exit while another thread still waits.

#include <zero/comm/blocking.h>

#include <atomic>

namespace zero::comm {
namespace {

std::atomic<void* (*)()> release_hook{nullptr};
std::atomic<void (*)(void*)> reacquire_hook{nullptr};

} // namespace

void set_blocking_hooks(void* (*release)(), void (*reacquire)(void*)) {
  // A scope reads `release` first: it must find its counterpart in place.
  release_hook.store(nullptr);
  reacquire_hook.store(reacquire);
  release_hook.store(reacquire == nullptr ? nullptr : release);
}

BlockingScope::BlockingScope() {
  if (auto* release = release_hook.load()) {
    reacquire_ = reacquire_hook.load();
    state_ = release();
  }
}

BlockingScope::~BlockingScope() {
  if (reacquire_ != nullptr) {
    reacquire_(state_);
  }
}

} // namespace zero::comm
