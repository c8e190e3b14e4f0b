#pragma once

// Norms of the whole gradient, from shards: the same bits on every rank, at every
// stage and world size, since block sums are added exactly.

#include <optional>
#include <vector>

#include <zero/comm/communicator.h>
#include <zero/optim/nonfinite.h>
#include <zero/sharding/gradients.h>
#include <zero/sharding/parameter_table.h>

namespace zero::optim {

struct NormOptions {
  double p = 2.0; // > 0, or infinity
  // One norm for each parameter group, instead of one for all of them.
  bool per_group = false;
  // Gradients are multiplied by it first, in the same pass.
  std::optional<double> factor = {};
  // The same on a device: fp64, one element there.
  at::Tensor device_factor = {};
};

struct GradientNorms {
  // Each rounded to fp32 once, unless all of its gradients are fp64; 0 of none.
  std::vector<double> values;
  Nonfinite nonfinite;
};

// [collective] Over all parameters that have a gradient: one pass, and one message
// of 96 bytes for each norm.
GradientNorms gradient_norms(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    comm::Communicator& communicator,
    const NormOptions& options);

// Throws c10::ValueError on what is no order of a norm.
void check_order(double p);
int64_t group_count(const sharding::ParameterTable& table);

// Every gradient that this rank holds: multiplied by `factor`, on a device by
// `device_factor` (fp64, one element, there; may be undefined) too; and clamped to
// [-limit, limit].
void scale_gradients(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    double factor,
    const at::Tensor& device_factor = {});
// Those that this rank holds beside its own shard.
void scale_outside_shards(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    double factor,
    const at::Tensor& device_factor = {});
void clamp_gradients(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    double limit);

} // namespace zero::optim
