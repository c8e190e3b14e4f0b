#include <zero/memory/heap.h>

#include <cstdlib>
#include <initializer_list>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <zero/memory/large_blocks.h>

namespace zero::memory {

#ifdef __GLIBC__

namespace {

constexpr int kKeptFree = 48 << 20;

bool set_by_environment() {
  for (const char* name :
       {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"}) {
    if (std::getenv(name) != nullptr) {
      return true;
    }
  }
  return false;
}

} // namespace

void keep_heap(int64_t largest) {
  if (!set_by_environment()) {
    mallopt(M_MMAP_THRESHOLD, static_cast<int>(largest));
    mallopt(M_TRIM_THRESHOLD, kKeptFree);
    keep_large_block(largest);
  }
}

void return_free_memory() {
  malloc_trim(0);
}

#else

void keep_heap(int64_t /*largest*/) {}
void return_free_memory() {}

#endif

} // namespace zero::memory
