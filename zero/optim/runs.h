#pragma once

// Runs: the stretches of a flat buffer that one kernel call covers, made of
// neighbouring parameters that are treated alike, padding between them included.

#include <cstdint>
#include <functional>
#include <vector>

#include <zero/sharding/parameter_table.h>

namespace zero::optim {

struct Run {
  layout::Range range; // elements of the bucket; whole 64-byte blocks
  int64_t key = 0; // what its parameters have in common
};

// Runs of a bucket inside `held`, over the parameters for which `key` gives a
// value >= 0; neighbours with equal values are joined.
std::vector<Run> runs_of(
    const sharding::ParameterTable& table,
    int64_t bucket,
    layout::Range held,
    const std::function<int64_t(int64_t parameter)>& key);

} // namespace zero::optim
