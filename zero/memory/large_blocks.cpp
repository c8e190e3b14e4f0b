#include <zero/memory/large_blocks.h>

#include <atomic>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

namespace zero::memory {

#ifdef __GLIBC__

namespace {

constexpr size_t kLargest = size_t{32} << 20;

std::atomic<size_t> smallest_kept{kLargest};
// No lock: it may be taken while another thread forks.
std::atomic<void*> kept{nullptr};

bool is_large(size_t bytes) {
  return bytes >= smallest_kept.load(std::memory_order_relaxed) && bytes <= kLargest;
}

// Torch's own, with one block between it and its callers.
class LargeBlocks final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = is_large(bytes) ? take(bytes) : nullptr;
    if (data == nullptr) {
      data = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
    }
    return {data, data, &give, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &give;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void* take(size_t bytes) {
    void* data = kept.exchange(nullptr);
    if (data == nullptr) {
      return nullptr;
    }
    const size_t held = malloc_usable_size(data);
    if (bytes <= held && held / 2 <= bytes) {
      c10::profiledCPUMemoryReporter().New(data, bytes);
      return data;
    }
    keep(data);
    return nullptr;
  }

  static void give(void* data) {
    if (data != nullptr && is_large(malloc_usable_size(data))) {
      c10::profiledCPUMemoryReporter().Delete(data);
      keep(data);
    } else {
      c10::GetDefaultCPUAllocator()->raw_deallocate(data);
    }
  }

  // The latest: what a forward frees makes way for backward's gradients.
  static void keep(void* data) {
    c10::free_cpu(kept.exchange(data));
  }
};

} // namespace

void keep_large_block(int64_t smallest) {
  static const bool installed = [] {
    if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) {
      return false;
    }
    c10::SetCPUAllocator(new LargeBlocks); // tensors hold it for good
    return true;
  }();
  if (installed) {
    smallest_kept.store(static_cast<size_t>(smallest));
  }
}

void drop_large_block() noexcept {
  c10::free_cpu(kept.exchange(nullptr));
}

#else

void keep_large_block(int64_t /*smallest*/) {}
void drop_large_block() noexcept {}

#endif

} // namespace zero::memory
