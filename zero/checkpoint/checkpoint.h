#pragma once

// Checkpoints of C++ programs, in the same files as Python's: a directory that loads at
// any number of ranks and any stage, from either language. See docs/checkpoints.md.

#include <cstdint>
#include <memory>
#include <string>

#include <zero/api.h>
#include <zero/checkpoint/background_save.h>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace zero {

class ZeroOptimizer;

struct SaveSettings {
  // A JSON text of the user's own, which load() gives back.
  std::string extra = "null";
  // Deletes older checkpoints beside this one, whose names differ from its name in their
  // number only ("step-1000"), until so many are left; 0: none.
  int64_t keep_last = 0;
};

// [collective] Parameters (fp32 masters, where there are any), buffers, native state, step
// counts, rules by group and each rank's torch random state. `directory` is made, or
// replaced if it is a checkpoint: what is on the disk is the old or the new one at every
// moment, and stays the old one where any rank fails; all throw then. `optimizer` null: of
// a module that is not sharded, in one process. Throws c10::NotImplementedError for an
// optimizer that steps by a factory's torch::optim optimizer.
ZERO_API void save(
    const std::string& directory,
    torch::nn::Module& module,
    ZeroOptimizer* optimizer = nullptr,
    const SaveSettings& settings = {});

// [collective] The same, but returns when each rank has copied its share, which threads
// write while training goes on: memory of this rank's shards until then. The handle's
// wait() throws what goes wrong later, on all ranks; so does the next save(), async_save()
// or load() of the optimizer, which waits for it. So does the end of the process.
ZERO_API std::shared_ptr<BackgroundSave> async_save(
    const std::string& directory,
    torch::nn::Module& module,
    ZeroOptimizer* optimizer = nullptr,
    const SaveSettings& settings = {});

struct LoadSettings {
  // Names that the module or the checkpoint lacks are an error.
  bool strict = true;
  // Checksums are compared first, shared out among the ranks.
  bool verify = true;
  // The optimizer's rules, step counts and state too.
  bool optimizer_state = true;
  // The random state that this rank had.
  bool rng = true;
};

// [collective] Returns `extra`. Throws c10::ValueError on all ranks, before anything is
// changed, for names, shapes, groups, rules and files that don't fit.
ZERO_API std::string load(
    const std::string& directory,
    torch::nn::Module& module,
    ZeroOptimizer* optimizer = nullptr,
    const LoadSettings& settings = {});

} // namespace zero
