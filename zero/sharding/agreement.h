#pragma once

// Everyone starts equal: before anything else, all ranks compare what they were
// given.

#include <string>
#include <vector>

#include <zero/comm/communicator.h>
#include <zero/options.h>
#include <zero/sharding/parameter_table.h>

namespace zero::sharding {

// [collective] Compares names, shapes, strides, dtypes, groups, order, buffers
// and options between the ranks. A difference raises on every rank, naming the
// first parameter that differs and both ranks.
void require_agreement(
    comm::Communicator& communicator,
    const std::vector<NamedParameter>& parameters,
    const std::vector<std::pair<std::string, at::Tensor>>& buffers,
    const Options& options);

} // namespace zero::sharding
