#pragma once

// What a checkpoint is made from, and loaded into: an engine's parameters and native
// state, and what no engine manages. Both faces describe a model by it.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/api.h>
#include <zero/checkpoint/manifest.h>
#include <zero/optim/engine.h>

namespace zero::checkpoint {

// A whole tensor that every rank has: a buffer, or a parameter that is not flat. Rank 0's
// is saved.
struct LooseTensor {
  std::string name;
  at::Tensor tensor;
  TensorKind kind = TensorKind::buffer;
};

// State of a rule outside the engine: of one parameter, one-dimensional, of the shape of
// Engine::shard_parameter().
struct ForeignState {
  int64_t index = 0;
  std::string name; // "square_avg"
  at::Tensor values;
};

struct Contents {
  std::shared_ptr<Engine> engine; // null: a plain model in one process
  bool native_state = false; // the engine's state is the optimizer's
  std::vector<LooseTensor> loose = {};
  std::vector<ForeignState> foreign = {};
  // Other names of parameters: {name, the name that it is saved under}.
  std::vector<std::pair<std::string, std::string>> tied = {};
};

// The state of a parameter that is its average, by EMA: no rule's own.
inline constexpr const char* kAverage = "zero.ema";

// The name of a state tensor in the manifest: "blocks.0.weight:exp_avg".
ZERO_API std::string state_name(const std::string& parameter, const std::string& state);
// And back: {parameter, state}.
ZERO_API std::pair<std::string, std::string> split_state_name(const std::string& name);

} // namespace zero::checkpoint
