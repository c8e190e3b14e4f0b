#pragma once

// What to do around a wait for other ranks. The Python bindings register a pair
// of functions that let go of the GIL and take it again; a C++ program registers
// none. Called by every function of this room that blocks its caller, on the
// caller's thread.

#include <zero/api.h>

namespace zero::comm {

// `release` runs before a blocking wait and returns what `reacquire` is given
// after it. Both null: nothing is called.
ZERO_API void set_blocking_hooks(void* (*release)(), void (*reacquire)(void*));

// The scope of one blocking wait.
class ZERO_API BlockingScope {
 public:
  BlockingScope();
  ~BlockingScope();
  BlockingScope(const BlockingScope&) = delete;
  BlockingScope& operator=(const BlockingScope&) = delete;

 private:
  void (*reacquire_)(void*) = nullptr;
  void* state_ = nullptr;
};

} // namespace zero::comm
