#pragma once

// Which bytes of which files hold a range of a tensor. Integers only.

#include <cstdint>
#include <string>
#include <vector>

#include <zero/api.h>
#include <zero/checkpoint/manifest.h>
#include <zero/checkpoint/permute.h>
#include <zero/layout/flat_layout.h>

namespace zero::checkpoint {

// One read: elements [offset, offset + count) of a piece.
struct PieceRead {
  int64_t file = 0; // index in Manifest::files
  int64_t piece = 0; // index in ManifestTensor::pieces
  std::string key = {}; // of the piece in the file
  int64_t offset = 0;
  int64_t count = 0;
  int64_t destination = 0; // in elements from the begin of what is filled
  bool operator==(const PieceRead&) const = default;
};

struct ReadPlan {
  // Sorted by file and, within a tensor, by position.
  std::vector<PieceRead> reads = {};
  // False: the reads fill the range itself. True: the orders in memory differ, so that
  // the reads fill a buffer of the whole tensor, from which permute_elements() takes the
  // range by `reordering`.
  bool whole = false;
  Reordering reordering = {};
};

// For elements `wanted` of a tensor whose reader has its dimensions in `order` (empty:
// row-major). c10::ValueError that names the tensor where the range is not within it.
ZERO_API ReadPlan plan_reads(
    const ManifestTensor& tensor,
    layout::Range wanted,
    const std::vector<int64_t>& order = {});

// Plans of several tensors in one: sorted by file, then in the order given.
ZERO_API void sort_reads(std::vector<PieceRead>& reads);

} // namespace zero::checkpoint
