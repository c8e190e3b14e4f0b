#pragma once

// An EMA's averages in checkpoints: further state of each parameter, in the optimizer's
// files, and the decay and the count of updates in the manifest's scalars. Internal.

#include <string>
#include <vector>

#include <zero/checkpoint/contents.h>
#include <zero/checkpoint/load.h>
#include <zero/optim/ema.h>

namespace zero::checkpoint {

// This rank's averages, as a save writes them. c10::ValueError where the average is of
// another engine than `engine`, c10::Error while it is swapped in.
ZERO_API std::vector<ForeignState> averages_of(EMA& ema, const Engine* engine);

// Throws as averages_of(), and c10::ValueError where a checkpoint was saved without averages.
ZERO_API void require_averages(const Checkpoint& checkpoint, EMA& ema, const Engine* engine);
// [collective] Each rank reads its part of them, after the parameters were loaded: those
// that were not averaged when they were saved (frozen then, or not there) start at their
// present values.
ZERO_API void load_averages(Checkpoint& checkpoint, EMA& ema);

} // namespace zero::checkpoint
