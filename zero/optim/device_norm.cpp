#include <zero/optim/device_norm.h>

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <zero/memory/device_kernels.h>
#include <zero/memory/device_streams.h>
#include <zero/memory/flat_buffer.h>
#include <zero/optim/gradient_stretches.h>

namespace zero::optim {
namespace {

// Stretches of gradients by the norm that they are part of.
using ByNorm = std::vector<std::vector<GradientStretch>>;

ByNorm stretches_by_norm(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    const NormOptions& options,
    bool& rounds) {
  ByNorm by_norm(options.per_group ? group_count(table) : 1);
  for (int64_t b = 0; b < table.bucket_count(); ++b) {
    auto& norm = by_norm[options.per_group ? table.group_of(b) : 0];
    for (const GradientStretch& stretch : gradient_stretches(
             table, gradients, b, table.shard(b), padding_for(options.factor.value_or(1.0)))) {
      norm.push_back(stretch);
    }
    const auto& parameters = table.bucket(b).layout.parameters;
    const bool any = std::any_of(parameters.begin(), parameters.end(), [&](int64_t parameter) {
      return gradients.has_gradient(parameter);
    });
    rounds = rounds || (any && gradients.reduced_dtype(b) != at::kDouble);
  }
  return by_norm;
}

bool scales(const NormOptions& options) {
  return options.factor.has_value() || options.device_factor.defined();
}

// This rank's sums, one a norm.
void sum_here(
    const ByNorm& by_norm,
    const NormOptions& options,
    const at::Tensor& sums,
    const at::TensorOptions& doubles) {
  const auto& kernels = memory::device_kernels(sums.device().type());
  const auto stream = memory::current_handle(sums.device());
  int64_t total = 0;
  for (const auto& norm : by_norm) {
    for (const GradientStretch& stretch : norm) {
      total += kernels.norm_part_count(stretch.count);
    }
  }
  const at::Tensor parts = at::empty({total}, doubles);
  auto* next = parts.mutable_data_ptr<double>();
  for (size_t g = 0; g < by_norm.size(); ++g) {
    double* const first = next;
    for (const GradientStretch& stretch : by_norm[g]) {
      kernels.norm_parts(
          stream,
          stretch.type,
          stretch.data,
          stretch.count,
          options.p,
          scales(options),
          options.factor.value_or(1.0),
          options.device_factor.defined() ? options.device_factor.const_data_ptr<double>()
                                          : nullptr,
          next);
      next += kernels.norm_part_count(stretch.count);
    }
    if (next != first) {
      kernels.sum_parts(
          stream, first, next - first, options.p, sums.mutable_data_ptr<double>() + g);
    }
  }
}

} // namespace

DeviceNorms device_norms(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    comm::Communicator& communicator,
    c10::Device device,
    const NormOptions& options) {
  check_order(options.p);
  const memory::Quiet quiet;
  bool rounds = false;
  const ByNorm by_norm = stretches_by_norm(table, gradients, options, rounds);
  const auto count = static_cast<int64_t>(by_norm.size());
  const int64_t ranks = communicator.shard_size();
  const auto doubles = at::TensorOptions(at::kDouble).device(device);
  const at::Tensor sums = at::zeros({ranks * count}, doubles);
  const at::Tensor own = memory::flat_view(sums, communicator.shard_rank() * count, count);
  sum_here(by_norm, options, own, doubles);
  if (scales(options)) {
    scale_outside_shards(table, gradients, options.factor.value_or(1.0), options.device_factor);
  }
  communicator.all_gather(sums, own, {"the gradient norm", 0, gradients.steps(), false})->wait();
  DeviceNorms norms{at::empty({count}, doubles), at::empty({1}, doubles.dtype(at::kFloat))};
  memory::device_kernels(device.type())
      .finish_norms(
          memory::current_handle(device),
          sums.const_data_ptr<double>(),
          ranks,
          count,
          options.p,
          rounds,
          norms.values.mutable_data_ptr<double>(),
          norms.found_nonfinite.mutable_data_ptr<float>());
  return norms;
}

at::Tensor device_clip_factor(const at::Tensor& norm, double max_norm) {
  const memory::Quiet quiet;
  at::Tensor factor = at::empty({1}, norm.options());
  memory::device_kernels(norm.device().type())
      .clip_factor(
          memory::current_handle(norm.device()),
          norm.const_data_ptr<double>(),
          max_norm,
          factor.mutable_data_ptr<double>());
  return factor;
}

} // namespace zero::optim
