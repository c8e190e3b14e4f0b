#pragma once

// What one rank writes of a model: its pieces, where their elements lie, and what the
// manifest says of their tensors. Internal.

#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/checkpoint/contents.h>
#include <zero/checkpoint/parts.h>
#include <zero/checkpoint/together.h>

namespace zero::checkpoint {

struct Source {
  OwnPiece piece;
  at::Tensor values; // one-dimensional, or a loose tensor
};

struct Collected {
  std::vector<ManifestTensor> tensors; // without pieces; the same on all ranks
  // In the order in which they are written.
  std::vector<Source> parameters; // and buffers
  std::vector<Source> state;
};

// [collective] Views of what the engine and the caller hold.
Collected collect(const Contents& contents, const Together& ranks);
// A source's elements in its memory order, on the CPU: a view where it can be one.
at::Tensor flat(const at::Tensor& values);

} // namespace zero::checkpoint
