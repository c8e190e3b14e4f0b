#include <zero/optim/gradient_norm.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include <ATen/ops/empty.h>

#include <zero/memory/device_kernels.h>
#include <zero/memory/device_streams.h>
#include <zero/optim/gradient_stretches.h>

namespace zero::optim {
namespace {

// A norm in the making, on this rank or on all.
struct Sum {
  kernels::ExactSum powers;
  bool rounds = false; // to fp32: a gradient is not fp64

  void merge(const Sum& other) {
    powers.merge(other.powers);
    rounds = rounds || other.rounds;
  }
  double norm(double p) const {
    double norm = 0.0;
    if (std::isinf(p)) {
      norm = powers.maximum();
    } else if (p == 2.0) {
      norm = std::sqrt(powers.total());
    } else {
      norm = p == 1.0 ? powers.total() : std::pow(powers.total(), 1.0 / p);
    }
    return rounds ? static_cast<double>(static_cast<float>(norm)) : norm;
  }
};

// What a rank says of one norm: the sum, whose flags leave room for `rounds` and, in
// the first message, for the first parameter that is not finite. It fits in the
// header of an exchange.
using Message = kernels::ExactSum::Wire;
static_assert(sizeof(Message) == 96);
constexpr uint64_t kSumFlags = 3;
constexpr uint64_t kRounds = 4;
constexpr unsigned kParameterShift = 8;

Message write(const Sum& sum, int64_t nonfinite) {
  Message message = sum.powers.wire();
  message.flags |= sum.rounds ? kRounds : 0;
  message.flags |= static_cast<uint64_t>(nonfinite + 1) << kParameterShift;
  return message;
}

Sum read_sum(Message message) {
  const bool rounds = (message.flags & kRounds) != 0;
  message.flags &= kSumFlags;
  return {kernels::ExactSum::from_wire(message), rounds};
}

int64_t read_nonfinite(const Message& message) {
  return static_cast<int64_t>(message.flags >> kParameterShift) - 1;
}

void scale_range(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    int64_t bucket,
    layout::Range range,
    double factor,
    const at::Tensor& device_factor = {}) {
  const c10::Device device = table.bucket(bucket).options.device();
  for (const GradientStretch& stretch :
       gradient_stretches(table, gradients, bucket, range, padding_for(factor))) {
    if (device.is_cpu()) {
      kernels::scale(stretch.type, stretch.data, factor, stretch.count);
    } else {
      memory::device_kernels(device.type())
          .scale(
              memory::current_handle(device),
              stretch.type,
              stretch.data,
              factor,
              device_factor.defined() ? device_factor.const_data_ptr<double>() : nullptr,
              stretch.count);
    }
  }
}

void clamp_stretch(const GradientStretch& stretch, c10::Device device, double limit) {
  if (device.is_cpu()) {
    kernels::clamp(stretch.type, stretch.data, -limit, limit, stretch.count);
  } else {
    memory::device_kernels(device.type())
        .clamp(
            memory::current_handle(device),
            stretch.type,
            stretch.data,
            -limit,
            limit,
            stretch.count);
  }
}

// Adds a bucket's gradients: those of the own shard at every stage, so that
// replicated ones count once.
void add_bucket(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    int64_t bucket,
    const NormOptions& options,
    Sum& sum) {
  const layout::Range own = table.shard(bucket);
  const double factor = options.factor.value_or(1.0);
  for (const GradientStretch& stretch :
       gradient_stretches(table, gradients, bucket, own, padding_for(factor))) {
    sum.rounds = sum.rounds || stretch.type != kernels::Type::f64;
    if (options.factor) {
      kernels::scale_and_accumulate_norm(
          stretch.type, stretch.data, factor, stretch.count, options.p, sum.powers);
    } else {
      kernels::accumulate_norm(stretch.type, stretch.data, stretch.count, options.p, sum.powers);
    }
  }
}

// [collective] The sums of a replica's ranks added up, exactly; those of others are equal.
Nonfinite add_ranks(
    std::vector<Sum>& sums,
    int64_t own_nonfinite,
    comm::Communicator& communicator,
    int64_t step) {
  std::vector<Message> messages;
  for (const Sum& sum : sums) {
    messages.push_back(write(sum, messages.empty() ? own_nonfinite : -1));
  }
  const size_t size = messages.size() * sizeof(Message);
  at::Tensor bytes = at::empty({static_cast<int64_t>(size)}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), messages.data(), size);
  sums.assign(sums.size(), {});
  Nonfinite nonfinite;
  int64_t rank = 0;
  for (const at::Tensor& other :
       communicator.exchange(bytes, {"the gradient norm", 0, step, false})) {
    std::memcpy(messages.data(), other.const_data_ptr(), size);
    for (size_t g = 0; g < sums.size() && rank < communicator.shard_size(); ++g) {
      sums[g].merge(read_sum(messages[g]));
    }
    nonfinite.merge(read_nonfinite(messages.front()), rank++);
  }
  return nonfinite;
}

} // namespace

int64_t group_count(const sharding::ParameterTable& table) {
  int64_t last = 0;
  for (int64_t i = 0; i < table.size(); ++i) {
    last = std::max(last, table.entry(i).parameter.group);
  }
  return last + 1;
}

void check_order(double p) {
  TORCH_CHECK_VALUE(p > 0.0, "[zero.optim] expected norm_type > 0 or infinity, got ", p);
}

GradientNorms gradient_norms(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    comm::Communicator& communicator,
    const NormOptions& options) {
  check_order(options.p);
  std::vector<Sum> sums(options.per_group ? group_count(table) : 1);
  for (int64_t b = 0; b < table.bucket_count(); ++b) {
    add_bucket(table, gradients, b, options, sums[options.per_group ? table.group_of(b) : 0]);
  }
  if (options.factor) {
    scale_outside_shards(table, gradients, *options.factor);
  }
  const bool finite =
      std::all_of(sums.begin(), sums.end(), [](const Sum& sum) { return sum.powers.finite(); });
  const int64_t own = finite ? -1 : first_nonfinite(table, gradients);
  GradientNorms norms;
  norms.nonfinite = add_ranks(sums, own, communicator, gradients.steps());
  for (const Sum& sum : sums) {
    norms.values.push_back(sum.norm(options.p));
  }
  return norms;
}

void scale_gradients(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    double factor,
    const at::Tensor& device_factor) {
  for (int64_t b = 0; b < table.bucket_count(); ++b) {
    scale_range(table, gradients, b, gradients.reduced_range(b), factor, device_factor);
    gradients.reduced_changed(b);
  }
}

void scale_outside_shards(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    double factor,
    const at::Tensor& device_factor) {
  for (int64_t b = 0; b < table.bucket_count(); ++b) {
    const layout::Range own = table.shard(b);
    const layout::Range held = gradients.reduced_range(b);
    scale_range(table, gradients, b, {held.begin, own.begin}, factor, device_factor);
    scale_range(table, gradients, b, {own.end, held.end}, factor, device_factor);
    gradients.reduced_changed(b);
  }
}

void clamp_gradients(
    const sharding::ParameterTable& table,
    sharding::GradientManager& gradients,
    double limit) {
  for (int64_t b = 0; b < table.bucket_count(); ++b) {
    for (const GradientStretch& stretch :
         gradient_stretches(table, gradients, b, gradients.reduced_range(b), Padding::included)) {
      clamp_stretch(stretch, table.bucket(b).options.device(), limit);
    }
    gradients.reduced_changed(b);
  }
}

} // namespace zero::optim
