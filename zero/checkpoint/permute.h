#pragma once

// Orders of dimensions in memory: a tensor's dimensions from the slowest to the fastest.
// An empty order is the row-major one. Integers and bytes only.

#include <cstdint>
#include <vector>

#include <zero/api.h>
#include <zero/layout/flat_layout.h>

namespace zero::checkpoint {

// The order of a dense tensor with these strides; empty where it is row-major. Dimensions
// of size 1 stay where row-major order has them.
ZERO_API std::vector<int64_t> memory_order(
    const std::vector<int64_t>& shape,
    const std::vector<int64_t>& strides);

// Whether both put every element at the same place.
ZERO_API bool same_order(
    const std::vector<int64_t>& shape,
    const std::vector<int64_t>& a,
    const std::vector<int64_t>& b);

struct Reordering {
  std::vector<int64_t> shape = {};
  std::vector<int64_t> from = {}; // the order of the source
  std::vector<int64_t> to = {}; // the order of the destination
  int64_t itemsize = 4; // 1, 2, 4, 8 or 16
};

// Elements `wanted` in the order of the destination, from all of the source. The two
// don't overlap. c10::ValueError on orders that are no permutations, or a range outside.
ZERO_API void permute_elements(
    const Reordering& reordering,
    const void* source,
    layout::Range wanted,
    void* destination);

} // namespace zero::checkpoint
