#pragma once

// The names and shapes of a model against those of what is to be loaded into it.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <zero/api.h>
#include <zero/checkpoint/contents.h>

namespace zero::checkpoint {

struct LoadResult {
  // Sorted: in the model and not in the checkpoint, and the other way round.
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
};

using Shapes = std::map<std::string, std::vector<int64_t>>;

// Of all parameters and buffers, each under its first name.
Shapes shapes_of(const Contents& contents);

// Throws one c10::ValueError for all that is not right in `found`, which is what there is
// in `where`: other shapes; if `strict`, also missing and unexpected names.
LoadResult match(const Shapes& wanted, const Shapes& found, const std::string& where, bool strict);

} // namespace zero::checkpoint
