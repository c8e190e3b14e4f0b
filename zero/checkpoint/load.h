#pragma once

// Loads a checkpoint into a model, whatever the number of ranks and the stages of the
// two: each rank reads what it holds.

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include <zero/api.h>
#include <zero/checkpoint/contents.h>
#include <zero/checkpoint/data_files.h>
#include <zero/checkpoint/match.h>

namespace zero::checkpoint {

struct LoadOptions {
  // Names that the model or the checkpoint lacks are an error; else they are left alone.
  // Other shapes always are one.
  bool strict = true;
  // Before anything is changed the checksums of all pieces are compared, shared out
  // among the ranks.
  bool verify = true;
};

// An open checkpoint, the same on all ranks of an engine.
class ZERO_API Checkpoint {
 public:
  // [collective] Throws on all ranks where one can't read the manifest, or reads another.
  Checkpoint(std::string directory, Engine* engine);

  const std::string& directory() const {
    return directory_;
  }
  const Manifest& manifest() const {
    return manifest_;
  }
  // Null where there is none.
  const ManifestTensor* find(const std::string& name) const;
  // Names of the state that a rule has of a parameter, sorted; empty without.
  std::vector<std::string> state_of(const std::string& parameter) const;

  // [collective] Parameters and buffers. Nothing is changed where names, shapes or
  // checksums are not right, on any rank; all errors of names are in one.
  LoadResult load_model(const Contents& contents, const LoadOptions& options = {});
  // [collective] Native state and step counts, by parameter name; those without lose
  // theirs. Of parameters that the checkpoint lacks, too.
  void load_native_state(Engine& engine, const std::map<std::string, int64_t>& steps, bool verify);
  // c10::ValueError where these parameters have state that the rule has not.
  void require_state(const Rule& rule, const std::vector<std::string>& parameters) const;
  // Where they have state of other names than `allowed`, those of `owner`.
  void require_state(
      const std::vector<std::string>& allowed,
      const std::string& owner,
      const std::vector<std::string>& parameters) const;
  // The elements of a state tensor that this rank steps, for a rule outside the engine.
  at::Tensor read_state(Engine& engine, int64_t index, const std::string& state);
  // [collective] Compares the checksums of state, as load_model() those of parameters.
  void verify_state(Engine* engine);

 private:
  struct Target {
    const ManifestTensor* tensor;
    std::vector<int64_t> order;
    int64_t begin;
    at::Tensor values; // one-dimensional
  };
  void verify(Engine* engine, bool state);
  void fill(const Target& target);
  void fill_loose(const LooseTensor& loose);
  Shapes shapes() const;

  const std::string directory_;
  Manifest manifest_;
  DataFiles files_;
  std::unordered_map<std::string, const ManifestTensor*> tensors_; // by name
  std::unordered_map<std::string, std::vector<std::string>> states_; // by parameter
};

} // namespace zero::checkpoint
