#include <zero/memory/slab_pool.h>

#include <algorithm>
#include <iterator>

namespace zero::memory {
namespace {

// A slab that is so many times as large is left to a unit that needs it: what is small
// is made anew for less.
constexpr int64_t kRoom = 2;

} // namespace

Slab SlabPool::take(int64_t numel, const at::TensorOptions& options) {
  const int64_t bytes = numel * static_cast<int64_t>(options.dtype().itemsize());
  Slab slab;
  {
    const std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const at::Tensor& held = it->bytes.tensor();
      const bool fits = held.numel() >= bytes && held.numel() <= kRoom * bytes &&
          held.device() == options.device();
      if (fits && (best == free_.end() || held.numel() < best->bytes.tensor().numel())) {
        best = it;
      }
    }
    if (best != free_.end()) {
      slab.bytes = std::move(best->bytes);
      slab.tensor = std::move(best->tensor);
      slab.last_use = std::move(best->last_use);
      free_.erase(best);
    }
  }
  if (!slab.bytes) {
    slab.bytes =
        FlatBuffer(bytes, options.dtype(at::kByte), Purpose::buffers, account_, source_.get());
  }
  slab.last_use.wait();
  if (!slab.tensor.defined() || slab.tensor.numel() != numel ||
      slab.tensor.dtype() != options.dtype()) {
    slab.tensor = tensor_over(slab.bytes.tensor().storage(), {numel}, {1}, options);
  }
  return slab;
}

void SlabPool::give(Slab slab) {
  slab.last_use.record(slab.tensor.device());
  const std::lock_guard lock(mutex_);
  free_.push_back({std::move(slab.bytes), std::move(slab.tensor), std::move(slab.last_use), true});
}

// Memory goes back to the stream that it came from.
template <typename Which>
void SlabPool::let_go(Which which) {
  std::erase_if(free_, [&](const Free& item) {
    const bool goes = which(item);
    if (goes) {
      item.last_use.wait();
    }
    return goes;
  });
}

void SlabPool::trim() {
  const std::lock_guard lock(mutex_);
  let_go([](const Free& item) { return !item.used; });
  for (Free& item : free_) {
    item.used = false;
  }
}

void SlabPool::keep_one() {
  const std::lock_guard lock(mutex_);
  const auto largest =
      std::max_element(free_.begin(), free_.end(), [](const Free& left, const Free& right) {
        return left.bytes.tensor().numel() < right.bytes.tensor().numel();
      });
  if (largest != free_.end()) {
    const auto* kept = largest->bytes.tensor().unsafeGetTensorImpl();
    let_go([=](const Free& item) { return item.bytes.tensor().unsafeGetTensorImpl() != kept; });
  }
}

void SlabPool::clear() {
  const std::lock_guard lock(mutex_);
  let_go([](const Free&) { return true; });
}

} // namespace zero::memory
