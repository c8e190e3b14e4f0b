#pragma once

// The arithmetic of a reduction on a device, queued on its current stream.

#include <ATen/core/Tensor.h>

namespace zero::comm {

// output = addend + (sum of the inputs in order) / divisor, summed in fp32 (fp64 for
// fp64) and rounded once. `inputs`: input_count times as many elements as the output,
// one input after the other. The addend may be undefined, and is of the output's dtype.
// Integers are only copied.
void reduce_on_device(
    const at::Tensor& inputs,
    int64_t input_count,
    const at::Tensor& output,
    const at::Tensor& addend,
    double divisor);

// Where the two are not the same memory.
void copy_on_device(const at::Tensor& target, const at::Tensor& source);

} // namespace zero::comm
