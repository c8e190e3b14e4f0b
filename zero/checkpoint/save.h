#pragma once

// Writes a checkpoint: each rank its share, straight from where it lies.

#include <cstdint>
#include <memory>
#include <string>

#include <zero/api.h>
#include <zero/checkpoint/contents.h>
#include <zero/checkpoint/parts.h>

namespace zero {
class BackgroundSave;
} // namespace zero

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
// non-contiguous buffer. Waits for a save of this engine in the background first, and
// throws its error.
ZERO_API void
save(const std::string& directory, const Contents& contents, const SaveOptions& options = {});

// [collective] The same, written by a thread of each rank from copies of its share, while
// training goes on. What is wrong with the directory is thrown here, what goes wrong later
// by BackgroundSave::wait(), or by the next call.
ZERO_API std::shared_ptr<BackgroundSave>
async_save(const std::string& directory, const Contents& contents, const SaveOptions& options = {});

// [collective] Waits for the save of an engine (null: of models without one) that is in
// the background, if any. Throws its error on all ranks, where one of them has not seen
// it by wait().
ZERO_API void settle_background_save(Engine* engine);
// Waits for all of them in this process; errors that nobody saw go to stderr. Also called
// when the process exits.
ZERO_API void finish_background_saves() noexcept;

} // namespace zero::checkpoint
