#pragma once

// Vectors of one item a bucket, which grow as the table does.

#include <cstdint>
#include <vector>

namespace zero::sharding {

template <typename T>
T& at_bucket(std::vector<T>& items, int64_t bucket) {
  if (static_cast<int64_t>(items.size()) <= bucket) {
    items.resize(bucket + 1);
  }
  return items[bucket];
}

// Whether there is one, and it holds something.
template <typename T>
bool has_bucket(const std::vector<T>& items, int64_t bucket) {
  return bucket < static_cast<int64_t>(items.size()) && static_cast<bool>(items[bucket]);
}

} // namespace zero::sharding
