#include <zero/optim/gradient_stretches.h>

#include <cmath>

#include <zero/optim/runs.h>

namespace zero::optim {

std::vector<GradientStretch> gradient_stretches(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    int64_t bucket,
    layout::Range range,
    Padding padding) {
  // Runs of equal keys are joined.
  const auto runs = runs_of(table, bucket, range, [&](int64_t parameter) {
    if (!gradients.has_gradient(parameter)) {
      return int64_t{-1};
    }
    return padding == Padding::included ? int64_t{0} : parameter;
  });
  std::vector<GradientStretch> stretches;
  if (runs.empty()) {
    return stretches; // asking for the reduced gradient would allocate it
  }
  const at::Tensor reduced = gradients.reduced(bucket);
  const int64_t first = gradients.reduced_range(bucket).begin;
  const kernels::Type type = memory::kernel_type(reduced.scalar_type());
  for (const Run& run : runs) {
    layout::Range part = run.range;
    if (padding == Padding::left_out) {
      part = layout::intersect(part, table.entry(run.key).slot.range());
    }
    if (part.size() > 0) {
      stretches.push_back(
          {type, memory::element(reduced, part.begin - first), part.size(), run.key});
    }
  }
  return stretches;
}

Padding padding_for(double factor) {
  return std::isfinite(factor) ? Padding::included : Padding::left_out;
}

} // namespace zero::optim
