#pragma once

// Slabs that come and go: unsharded units and open gradient buckets take their
// memory here and give it back, so that steady training allocates nothing and
// peaks at the same bytes in every step.

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <zero/memory/device_streams.h>
#include <zero/memory/flat_buffer.h>

namespace zero::memory {

// Elements of one dtype at the start of a pooled buffer.
struct Slab {
  FlatBuffer bytes = {};
  at::Tensor tensor = {};
  Moment last_use = {}; // by whom it was given back last, perhaps on another stream
  explicit operator bool() const {
    return tensor.defined();
  }
};

// Thread-safe. Counted as Purpose::buffers, also while free.
class SlabPool {
 public:
  explicit SlabPool(
      std::shared_ptr<Account> account,
      std::shared_ptr<BufferSource> source = nullptr)
      : account_(std::move(account)), source_(std::move(source)) {}

  // `numel` elements of any value. On a device they are the current stream's from its next
  // operation on, and back where the current stream has come to at give().
  Slab take(int64_t numel, const at::TensorOptions& options);
  void give(Slab slab);
  // Lets go of free slabs that were not taken since the last trim.
  void trim();
  // Lets go of all free slabs but the largest.
  void keep_one();
  void clear();
  const std::shared_ptr<Account>& account() const {
    return account_;
  }

 private:
  struct Free {
    FlatBuffer bytes;
    at::Tensor tensor; // as it was given back
    Moment last_use;
    bool used = false; // since the last trim
  };
  template <typename Which>
  void let_go(Which which); // of the free ones
  std::mutex mutex_;
  std::vector<Free> free_;
  std::shared_ptr<Account> account_;
  std::shared_ptr<BufferSource> source_;
};

} // namespace zero::memory
