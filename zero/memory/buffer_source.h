#pragma once

#include <cstdint>

#include <c10/core/Storage.h>

namespace zero::memory {

// Where flat buffers may get large blocks from, instead of the system.
class BufferSource {
 public:
  virtual ~BufferSource() = default;
  // Zeroed CPU memory of `bytes` bytes, 64-byte aligned; null where there is none to
  // give, and the caller takes ordinary memory.
  virtual c10::Storage allocate(int64_t bytes) = 0;
  // The same of a device's memory, not zeroed.
  virtual c10::Storage allocate_on(c10::Device /*device*/, int64_t /*bytes*/) {
    return {};
  }
};

} // namespace zero::memory
