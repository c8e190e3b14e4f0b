#pragma once

// Ranks as threads that form a grid: rank i * shards + j is shard j of replica i.

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <zero/comm/groups.h>

#include "ranks.h"

namespace zero::test {

struct Shape {
  int64_t replicas;
  int64_t shards;
  int64_t size() const {
    return replicas * shards;
  }
};

inline Group prefixed(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::string& name,
    int64_t rank,
    int64_t size) {
  return store_group(c10::make_intrusive<c10d::PrefixStore>(name, store), rank, size);
}

using GridBody = std::function<void(int64_t rank, const Groups& groups)>;

inline void run_grid(const Shape& shape, const GridBody& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_threads(shape.size(), [&](int64_t rank) {
    const int64_t replica = rank / shape.shards;
    const int64_t shard = rank % shape.shards;
    body(
        rank,
        Groups{
            .shard = prefixed(store, "row " + std::to_string(replica), shard, shape.shards),
            .replicate =
                prefixed(store, "column " + std::to_string(shard), replica, shape.replicas)});
  });
}

} // namespace zero::test
