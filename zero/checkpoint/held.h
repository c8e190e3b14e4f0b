#pragma once

// What one rank holds of a model, for state dicts of shards: values and native state, as
// views of the engine's memory. A view is one-dimensional, in the memory order of the
// parameter, and empty where the rank holds none of it; at stage 0, where nothing is
// sharded, it is whole and in the parameter's shape.

#include <cstdint>
#include <map>
#include <string>

#include <ATen/core/Tensor.h>

#include <zero/api.h>
#include <zero/optim/engine.h>

namespace zero::checkpoint {

// By index: of parameters whose own memory is not what a state dict has to keep, which are
// those of stage 3, and those with fp32 masters (of which it is the master). No
// communication.
ZERO_API std::map<int64_t, at::Tensor> held_values(Engine& engine);
// By index and name: state of those that have taken steps, and "step" (0-dim fp32). No
// communication.
ZERO_API std::map<int64_t, std::map<std::string, at::Tensor>> held_state(Engine& engine);

// [collective] Copies tensors of these shapes into held_values(); other parameters stay.
ZERO_API void load_held_values(Engine& engine, const std::map<int64_t, at::Tensor>& values);
// Replaces a parameter's state; an empty map clears it. No communication.
ZERO_API void
load_held_state(Engine& engine, int64_t index, const std::map<std::string, at::Tensor>& state);

} // namespace zero::checkpoint
