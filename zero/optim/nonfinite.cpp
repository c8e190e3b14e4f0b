#include <zero/optim/nonfinite.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <ATen/ops/empty.h>

#include <zero/memory/device_kernels.h>
#include <zero/memory/device_streams.h>
#include <zero/optim/gradient_stretches.h>

namespace zero::optim {
namespace {

// On a device: waits for it.
bool has_nonfinite(const GradientStretch& stretch, c10::Device device) {
  if (device.is_cpu()) {
    return kernels::first_nonfinite(stretch.type, stretch.data, stretch.count) >= 0;
  }
  constexpr double kLargest = std::numeric_limits<double>::infinity();
  const memory::Quiet quiet;
  const auto& kernels = memory::device_kernels(device.type());
  const auto stream = memory::current_handle(device);
  const int64_t count = kernels.norm_part_count(stretch.count);
  const auto doubles = at::TensorOptions(at::kDouble).device(device);
  const at::Tensor parts = at::empty({count}, doubles);
  const at::Tensor largest = at::empty({}, doubles);
  auto* values = parts.mutable_data_ptr<double>();
  kernels.norm_parts(
      stream, stretch.type, stretch.data, stretch.count, kLargest, false, 1.0, nullptr, values);
  kernels.sum_parts(stream, values, count, kLargest, largest.mutable_data_ptr<double>());
  return !std::isfinite(largest.item<double>());
}

Nonfinite agree(int64_t own, comm::Communicator& communicator, int64_t step) {
  at::Tensor message = at::empty({static_cast<int64_t>(sizeof(own))}, at::kByte);
  std::memcpy(message.mutable_data_ptr(), &own, sizeof(own));
  Nonfinite first;
  int64_t rank = 0;
  for (const at::Tensor& other :
       communicator.exchange(message, {"the check for non-finite gradients", 0, step, false})) {
    int64_t theirs = -1;
    std::memcpy(&theirs, other.const_data_ptr(), sizeof(theirs));
    first.merge(theirs, rank++);
  }
  return first;
}

} // namespace

void Nonfinite::merge(int64_t parameter_of_rank, int64_t from) {
  if (parameter_of_rank >= 0 && (parameter < 0 || parameter_of_rank < parameter)) {
    parameter = parameter_of_rank;
    rank = from;
  }
}

int64_t first_nonfinite(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients) {
  int64_t first = -1;
  for (int64_t b = 0; b < table.bucket_count(); ++b) {
    const layout::Range held = gradients.reduced_range(b);
    const auto joined = gradient_stretches(table, gradients, b, held, Padding::included);
    const c10::Device device = table.bucket(b).options.device();
    if (std::none_of(joined.begin(), joined.end(), [device](const GradientStretch& stretch) {
          return has_nonfinite(stretch, device);
        })) {
      continue;
    }
    for (const GradientStretch& own :
         gradient_stretches(table, gradients, b, held, Padding::left_out)) {
      if ((first < 0 || own.parameter < first) && has_nonfinite(own, device)) {
        first = own.parameter;
      }
    }
  }
  return first;
}

Nonfinite find_nonfinite(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    comm::Communicator& communicator) {
  return agree(first_nonfinite(table, gradients), communicator, gradients.steps());
}

Nonfinite scale_and_find_nonfinite(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    comm::Communicator& communicator,
    double factor) {
  kernels::ExactSum largest; // infinite or NaN where an element is
  for (int64_t b = 0; b < table.bucket_count(); ++b) {
    for (const GradientStretch& stretch :
         gradient_stretches(table, gradients, b, gradients.reduced_range(b), padding_for(factor))) {
      kernels::scale_and_accumulate_norm(
          stretch.type,
          stretch.data,
          factor,
          stretch.count,
          std::numeric_limits<double>::infinity(),
          largest);
    }
    gradients.reduced_changed(b);
  }
  const int64_t own = largest.finite() ? -1 : first_nonfinite(table, gradients);
  return agree(own, communicator, gradients.steps());
}

} // namespace zero::optim
