#pragma once

// Writes a checkpoint: each rank its share, straight from where it lies.

#include <cstdint>
#include <string>

#include <zero/api.h>
#include <zero/checkpoint/contents.h>
#include <zero/checkpoint/parts.h>

namespace zero::checkpoint {

struct SaveOptions {
  // JSON texts for the manifest.
  std::string optimizer = "null";
  std::string scalars = "null";
  std::string extra = "null";
  // How many of the checkpoints beside this one, whose names differ in their number, to
  // keep, this one among them; 0: all.
  int64_t keep_last = 0;
  int64_t part_bytes = kPartBytes;
};

// [collective] Afterwards `directory` is this checkpoint, on the disk of rank 0, whose
// file system the ranks share. Where one rank fails, all throw, and what was there before
// is still there. Nothing of the model changes, and takes no memory beyond one
// non-contiguous buffer.
ZERO_API void
save(const std::string& directory, const Contents& contents, const SaveOptions& options = {});

} // namespace zero::checkpoint
