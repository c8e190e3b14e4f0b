#pragma once

// The reduced gradients that this rank holds, as stretches that one kernel call
// covers. Their dtype is that of the reduced gradient, not of the parameter.

#include <vector>

#include <zero/memory/kernel_type.h>
#include <zero/sharding/gradients.h>
#include <zero/sharding/parameter_table.h>

namespace zero::optim {

struct GradientStretch {
  kernels::Type type;
  void* data; // starts a 64-byte block of the bucket
  int64_t count;
  int64_t parameter; // whose it is, where padding is left out
};

// Neighbouring parameters together with the padding between them, which is zero and
// must stay so; or each parameter by itself.
enum class Padding : uint8_t { included, left_out };

// Over the parameters of a bucket that have a gradient, inside `range`, which this
// rank must hold.
std::vector<GradientStretch> gradient_stretches(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    int64_t bucket,
    layout::Range range,
    Padding padding);

// How stretches are to be taken that are going to be multiplied by `factor`: zero
// times infinity is not zero.
Padding padding_for(double factor);

} // namespace zero::optim
