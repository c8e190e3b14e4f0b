#pragma once

// Checkpoints of C++ programs, in the same files as Python's: a directory that loads at
// any number of ranks and any stage, from either language. See docs/checkpoints.md.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include <zero/api.h>
#include <zero/checkpoint/background_save.h>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace zero {

class EMA;
class ZeroOptimizer;

struct SaveSettings {
  // A JSON text of the user's own, which load() gives back.
  std::string extra = "null";
  // Deletes older checkpoints beside this one, whose names differ from its name in their
  // number only ("step-1000"), until so many are left; 0: none.
  int64_t keep_last = 0;
  // Of this optimizer: its averages, decay and count of updates too. Not while it is
  // swapped in.
  EMA* ema = nullptr;
};

// [collective] Parameters (fp32 masters, where there are any), buffers, native state, step
// counts, rules by group and each rank's torch random state. `directory` is made, or
// replaced if it is a checkpoint: what is on the disk is the old or the new one at every
// moment, and stays the old one where any rank fails; all throw then. `optimizer` null: of
// a module that is not sharded, in one process. Of a factory's torch::optim optimizer, SGD,
// Adam, AdamW, RMSprop and Adagrad are known; throws c10::NotImplementedError for others.
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
  // Gets what was saved of one; a c10::ValueError where none was.
  EMA* ema = nullptr;
};

// [collective] Returns `extra`. Throws c10::ValueError on all ranks, before anything is
// changed, for names, shapes, groups, rules and files that don't fit.
ZERO_API std::string load(
    const std::string& directory,
    torch::nn::Module& module,
    ZeroOptimizer* optimizer = nullptr,
    const LoadSettings& settings = {});

// ---- whole weights in files that others read and write ----

struct ConsolidateSettings {
  // Of every floating tensor, trained, frozen or a buffer; none: as saved, which for
  // parameters with masters is fp32.
  std::optional<c10::ScalarType> dtype = std::nullopt;
  // Bytes of tensors in a file; 0: one file. A tensor that is larger has a file alone.
  int64_t max_file_bytes = 0;
  // All names of tied tensors, as a strict load in torch needs them. False: each tensor
  // once, as safetensors' save_model writes it; the metadata has the other names.
  bool tied = true;
  // Checksums are compared while reading.
  bool verify = true;
};

// Writes parameters and buffers of a checkpoint under their names, whole and row-major,
// into one safetensors file "NAME.safetensors"; where they are more than a file may hold,
// into "NAME-00001-of-00003.safetensors" and so on, with "NAME.safetensors.index.json" as
// Hugging Face has it. In one process without any group, whatever the world size and
// stage that saved; takes a block of memory, and where a tensor lies in memory otherwise
// than row-major, that tensor.
//
// Written beside and renamed when all of it is on the disk; a file of that name, its
// earlier parts and its index are replaced only then. Returns the paths, the index last.
// Throws c10::ValueError for files of the checkpoint that are damaged or missing, and for
// a `file` that has another suffix, is a directory, or lies in the checkpoint's own.
ZERO_API std::vector<std::string> consolidate(
    const std::string& directory,
    const std::string& file,
    const ConsolidateSettings& settings = {});

struct LoadWeightsSettings {
  // Names that the module or the file lacks are an error.
  bool strict = true;
};

// [collective] Parameters and buffers from a safetensors file of whole tensors: each rank
// reads it, one tensor after the other, and keeps what it holds. Masters get the file's
// exact values; the optimizer's state stays. Tied parameters may be there under any or all
// of their names. Throws c10::ValueError on all ranks, before anything is changed, for
// names and shapes that don't fit.
ZERO_API void load_weights(
    const std::string& file,
    torch::nn::Module& module,
    ZeroOptimizer* optimizer = nullptr,
    const LoadWeightsSettings& settings = {});

} // namespace zero
