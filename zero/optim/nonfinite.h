#pragma once

// Infinities and NaN in gradients: which parameter, and agreed by all ranks, so that
// all of them leave a step out or none does.

#include <cstdint>

#include <zero/comm/communicator.h>
#include <zero/sharding/gradients.h>
#include <zero/sharding/parameter_table.h>

namespace zero::optim {

struct Nonfinite {
  int64_t parameter = -1; // the first in the model's order; -1: gradients are finite
  int64_t rank = -1; // the first that holds such an element of it
  explicit operator bool() const {
    return parameter >= 0;
  }
  // Takes in what a rank found; in rank order.
  void merge(int64_t parameter_of_rank, int64_t from);
};

// The first parameter of whose gradient this rank holds a non-finite element; -1
// without one. One pass that writes nothing.
int64_t first_nonfinite(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients);

// [collective] The first on any rank: a message of 8 bytes.
Nonfinite find_nonfinite(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    comm::Communicator& communicator);

// [collective] The same, of gradients that it multiplies by `factor`, in one pass.
Nonfinite scale_and_find_nonfinite(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    comm::Communicator& communicator,
    double factor);

} // namespace zero::optim
