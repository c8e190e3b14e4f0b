#pragma once

// What Python says of a model, as zero/checkpoint takes it.

#include "bindings.h"

#include <pybind11/stl.h>

#include <zero/checkpoint/contents.h>

namespace zero::bindings {

// (name, tensor, whether it is a parameter)
using Loose = std::vector<std::tuple<std::string, at::Tensor, bool>>;
using Foreign = std::vector<std::tuple<int64_t, std::string, at::Tensor>>;
using Names = std::vector<std::pair<std::string, std::string>>;
using MaybeEngine = std::optional<std::shared_ptr<Engine>>; // None: a plain model

checkpoint::Contents
contents_of(const MaybeEngine& engine, bool native_state, Loose loose, Foreign foreign);

} // namespace zero::bindings
