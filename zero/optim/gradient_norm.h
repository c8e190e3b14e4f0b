#pragma once

// The norm of the whole gradient, from shards: the same bits on every rank, at
// every stage and world size, since block sums are added exactly.

#include <zero/comm/communicator.h>
#include <zero/sharding/gradients.h>
#include <zero/sharding/parameter_table.h>

namespace zero::optim {

// [collective] The p-norm (p > 0, or infinity) over all parameters that have a
// gradient, 0 when none has; rounded to fp32 once, unless every gradient is fp64.
double gradient_norm(
    sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    comm::Communicator& communicator,
    double p);

// Multiplies every gradient that this rank holds.
void scale_gradients(
    sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    double factor);

} // namespace zero::optim
