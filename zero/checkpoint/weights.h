#pragma once

// Loads whole tensors that come from anywhere into a model: each rank takes them one
// after the other, and keeps what it holds.

#include <cstdint>
#include <functional>
#include <string>

#include <ATen/core/Tensor.h>

#include <zero/api.h>
#include <zero/checkpoint/contents.h>
#include <zero/checkpoint/match.h>

namespace zero::checkpoint {

// The same on all ranks, each of which opens its own.
struct WeightSource {
  std::string where; // a path, for errors
  // Opens it: all names and shapes. Called once, first.
  std::function<Shapes()> open;
  // A whole tensor of any strides and dtype.
  std::function<at::Tensor(const std::string& name)> read;
};

// A safetensors file.
ZERO_API WeightSource safetensors_source(const std::string& file);

// [collective] Masters get exact values; state stays. A tied parameter (Contents::tied) may
// be there under any of its names. Throws on all ranks, before anything is changed, where
// the source does not open, is another one on some rank, or has names and shapes that
// don't fit (those that are missing or unexpected only if `strict`).
ZERO_API LoadResult load_weights(const WeightSource& source, const Contents& contents, bool strict);

} // namespace zero::checkpoint
