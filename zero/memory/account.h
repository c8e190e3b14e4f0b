#pragma once

// What is held: bytes by kind, now and at most since the last mark.

#include <array>
#include <cstdint>
#include <mutex>

#include <zero/api.h>

namespace zero::memory {

enum class Purpose { parameters, gradients, optimizer_state, buffers };

struct Usage {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer_state = 0;
  int64_t buffers = 0; // open buckets and communication buffers
};

class ZERO_API Account {
 public:
  void add(Purpose purpose, int64_t bytes);
  Usage held() const;
  Usage peak() const;
  // The peak starts again from what is held now.
  void mark();

 private:
  mutable std::mutex mutex_;
  std::array<int64_t, 4> held_{};
  std::array<int64_t, 4> peak_{};
};

} // namespace zero::memory
