#include <zero/memory/account.h>

#include <algorithm>

namespace zero::memory {
namespace {

Usage usage_of(const std::array<int64_t, 4>& bytes) {
  return {bytes[0], bytes[1], bytes[2], bytes[3]};
}

} // namespace

void Account::add(Purpose purpose, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto kind = static_cast<size_t>(purpose);
  held_[kind] += bytes;
  peak_[kind] = std::max(peak_[kind], held_[kind]);
}

Usage Account::held() const {
  const std::lock_guard lock(mutex_);
  return usage_of(held_);
}

Usage Account::peak() const {
  const std::lock_guard lock(mutex_);
  return usage_of(peak_);
}

void Account::mark() {
  const std::lock_guard lock(mutex_);
  peak_ = held_;
}

} // namespace zero::memory
