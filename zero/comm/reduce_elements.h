#pragma once

// The arithmetic of a reduction, the same for every transport.

#include <cstdint>
#include <vector>

#include <zero/comm/arguments.h>

namespace zero::comm {

// out = addend + (sum over inputs in order) / divisor for `count` elements, with
// any alignment of `out` and `addend`; `addend` may be null. Sums of integers wrap.
void reduce_elements(
    const ReduceArguments& arguments,
    char* out,
    const std::vector<const void*>& inputs,
    const char* addend,
    int64_t count);

} // namespace zero::comm
