#pragma once

// See [Note: gloo shim] in gloo/algorithm.h. Contexts live behind pointers, made
// and destroyed inside libtorch_cpu.

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

} // namespace gloo
