#include <zero/optim/gradient_norm.h>

#include <cmath>
#include <cstring>

#include <ATen/ops/empty.h>

#include <zero/optim/kernel_type.h>
#include <zero/optim/runs.h>

namespace zero::optim {
namespace {

using memory::element;

std::vector<Run> runs_with_gradient(
    sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    int64_t bucket,
    layout::Range range) {
  return runs_of(table, bucket, range, [&](int64_t parameter) {
    return gradients.has_gradient(parameter) ? 0 : -1;
  });
}

// Every rank's sum added up, exactly.
kernels::ExactSum
sum_over_ranks(const kernels::ExactSum& own, comm::Communicator& communicator, int64_t step) {
  const kernels::ExactSum::Wire wire = own.wire();
  at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof(wire))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &wire, sizeof(wire));
  kernels::ExactSum total;
  for (const at::Tensor& other :
       communicator.exchange(bytes, {"the gradient norm", 0, step, false})) {
    kernels::ExactSum::Wire theirs;
    std::memcpy(&theirs, other.const_data_ptr(), sizeof(theirs));
    total.merge(kernels::ExactSum::from_wire(theirs));
  }
  return total;
}

} // namespace

double gradient_norm(
    sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    comm::Communicator& communicator,
    double p) {
  TORCH_CHECK_VALUE(p > 0.0, "[zero.optim] expected norm_type > 0 or infinity, got ", p);
  kernels::ExactSum own;
  bool all_double = table.bucket_count() > 0;
  for (int64_t b = 0; b < table.bucket_count(); ++b) {
    if (!table.bucket(b).trainable) {
      continue;
    }
    const auto type = table.bucket(b).options.dtype().toScalarType();
    all_double = all_double && type == at::kDouble;
    // The own shard at every stage: replicated gradients count once.
    const auto runs = runs_with_gradient(table, gradients, b, table.shard(b));
    if (runs.empty()) {
      continue;
    }
    const at::Tensor reduced = gradients.reduced(b);
    const int64_t first = gradients.reduced_range(b).begin;
    for (const Run& run : runs) {
      kernels::accumulate_norm(
          kernel_type(type), element(reduced, run.range.begin - first), run.range.size(), p, own);
    }
  }
  const kernels::ExactSum sum = sum_over_ranks(own, communicator, gradients.steps());
  double norm = 0.0;
  if (std::isinf(p)) {
    norm = sum.maximum();
  } else if (p == 2.0) {
    norm = std::sqrt(sum.total());
  } else {
    norm = p == 1.0 ? sum.total() : std::pow(sum.total(), 1.0 / p);
  }
  return all_double ? norm : static_cast<double>(static_cast<float>(norm));
}

void scale_gradients(
    sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    double factor) {
  for (int64_t b = 0; b < table.bucket_count(); ++b) {
    const layout::Range held = gradients.reduced_range(b);
    const auto runs = runs_with_gradient(table, gradients, b, held);
    if (runs.empty()) {
      continue;
    }
    const at::Tensor reduced = gradients.reduced(b);
    const kernels::Type type = kernel_type(reduced.scalar_type());
    for (const Run& run : runs) {
      kernels::scale(
          type, element(reduced, run.range.begin - held.begin), factor, run.range.size());
    }
  }
}

} // namespace zero::optim
