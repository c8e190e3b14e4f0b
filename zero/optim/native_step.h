#pragma once

// Steps a bucket by a native rule: one kernel pass over the part of it that this
// rank updates.

#include <zero/options.h>
#include <zero/sharding/bucket_stepper.h>
#include <zero/sharding/master_weights.h>
#include <zero/sharding/optimizer_state.h>
#include <zero/sharding/parameter_table.h>

namespace zero::optim {

// Updates the parameters of the bucket that have a gradient, or their masters and
// with those the parameters, and counts their step. Runs where the masters are, else
// where the parameters are. On a device queues all that;
// `found_nonfinite` (fp32 there, may be undefined): not 0, and the step is left out.
void native_step(
    sharding::ParameterTable& table,
    const sharding::BucketGradient& gradient,
    sharding::OptimizerStateManager& state,
    sharding::MasterWeights& masters,
    int64_t bucket,
    const Rule& rule,
    const at::Tensor& found_nonfinite = {});

} // namespace zero::optim
