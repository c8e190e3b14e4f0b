// Norms on devices and what follows from them, by their bodies on the host, against
// plain fp64 arithmetic; and the counters of steps.

#include <cmath>

#include "catch.h"
#include "kernel_values.h"

#include "csrc/kernels/device_kernels.h"

using namespace kernel_values;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
const std::vector<double> kOrders = {1.0, 2.0, 3.0, kInf};
const std::vector<int64_t> kCounts = {0, 1, 7, 15, 16, 17, 1000, 4096, 4099, 100003};

const DeviceKernels& kernels() {
  return host_device_kernels();
}

// The sum of powers on a device, of x where it lies; scaled first where `factor`.
double device_sum(Type type, void* x, int64_t count, double p, const double* factor = nullptr) {
  const int64_t part_count = kernels().norm_part_count(count);
  REQUIRE(part_count >= 1);
  std::vector<double> parts(part_count + 1, 7.0);
  kernels().norm_parts(
      nullptr, type, x, count, p, factor != nullptr, factor ? *factor : 1.0, nullptr, parts.data());
  REQUIRE(parts.back() == 7.0);
  double sum = -1.0;
  kernels().sum_parts(nullptr, parts.data(), part_count, p, &sum);
  return sum;
}

double device_norm(const std::vector<double>& sums, double p, bool rounds, float* found) {
  double norm = -1.0;
  kernels().finish_norms(
      nullptr, sums.data(), static_cast<int64_t>(sums.size()), 1, p, rounds, &norm, found);
  return norm;
}

// In another order than the kernels', in extended precision.
double reference_sum(const at::Tensor& x, double p) {
  const at::Tensor wide = x.to(at::kDouble).contiguous();
  const auto* const values = wide.const_data_ptr<double>();
  long double sum = 0.0L;
  for (int64_t i = wide.numel() - 1; i >= 0; --i) {
    const auto magnitude = static_cast<long double>(std::abs(values[i]));
    if (std::isinf(p)) {
      sum = std::max(sum, magnitude);
    } else {
      sum += p == 2.0 ? magnitude * magnitude : p == 1.0 ? magnitude : std::pow(magnitude, 3.0L);
    }
  }
  return static_cast<double>(sum);
}

bool near(double a, double b) {
  return a == b || std::abs(a - b) <= 1e-13 * std::abs(b);
}

} // namespace

TEST_CASE("sums of powers on devices are those of plain arithmetic", "[kernels]") {
  for (const Type type : kTypes) {
    for (const int64_t count : kCounts) {
      const at::Tensor x = random(count, type, 1);
      const at::Tensor shifted = at::full({count + 1}, 1e4, x.options());
      shifted.narrow(0, 1, count).copy_(x);
      for (const double p : kOrders) {
        INFO("p " << p << ", " << count << " of " << scalar_type(type));
        const at::Tensor before = x.clone();
        const double sum = device_sum(type, element(x), count, p);
        REQUIRE(near(sum, reference_sum(x, p)));
        REQUIRE(same_bits(x, before));
        // The order of the sum does not depend on where the buffer lies.
        REQUIRE(device_sum(type, element(shifted, 1), count, p) == sum);
      }
    }
  }
}

TEST_CASE("large buffers have more tiles than parts", "[kernels]") {
  const int64_t count = 9'000'001;
  REQUIRE(kernels().norm_part_count(count) < count / 4096);
  const at::Tensor x = random(count, Type::bf16, 2);
  REQUIRE(near(device_sum(Type::bf16, element(x), count, 2.0), reference_sum(x, 2.0)));
  REQUIRE(device_sum(Type::bf16, element(x), count, kInf) == reference_sum(x, kInf));
}

TEST_CASE("norms on devices scale first, in the same pass", "[kernels]") {
  for (const Type type : kTypes) {
    for (const int64_t count : kCounts) {
      for (const int64_t offset : {0, 1}) {
        for (const double factor : {0.1, 1.0}) {
          INFO(count << " of " << scalar_type(type) << " from " << offset << " by " << factor);
          const at::Tensor all = at::full({count + 32}, 7.0, scalar_type(type));
          const at::Tensor x = all.narrow(0, offset, count);
          x.copy_(random(count, type, 3));
          const at::Tensor scaled = x.clone();
          scale(type, element(scaled), factor, count);
          const double sum = device_sum(type, element(x), count, 2.0, &factor);
          REQUIRE(same_bits(x.contiguous(), scaled));
          REQUIRE(near(sum, reference_sum(scaled, 2.0)));
          REQUIRE(all.slice(0, 0, offset).eq(7.0).all().item<bool>());
          REQUIRE(all.slice(0, offset + count).eq(7.0).all().item<bool>());
        }
      }
    }
  }
}

TEST_CASE("norms on devices multiply by a number of the device", "[kernels]") {
  const at::Tensor x = random(1000, Type::f32, 4);
  const at::Tensor expected = x.clone();
  scale(Type::f32, element(expected), 0.3 * 0.7, 1000);
  const double device_factor = 0.7;
  double part = 0.0;
  kernels().norm_parts(nullptr, Type::f32, element(x), 1000, 2.0, true, 0.3, &device_factor, &part);
  REQUIRE(same_bits(x, expected));
  REQUIRE(near(part, reference_sum(expected, 2.0)));
}

TEST_CASE("norms on devices show infinities and NaN wherever they are", "[kernels]") {
  for (const Type type : kTypes) {
    for (const int64_t count : {17, 4099, 100003}) {
      for (const int64_t at : {int64_t{0}, count / 2, count - 1}) {
        for (const float value : {kInfinity, -kInfinity, kNan}) {
          const at::Tensor x = random(count, type, 5);
          x[at] = value;
          for (const double p : kOrders) {
            INFO(value << " at " << at << " of " << count << ", p " << p);
            const double sum = device_sum(type, element(x), count, p);
            REQUIRE((std::isnan(value) ? std::isnan(sum) : sum == kInf));
            float found = 7.0F;
            const double norm = device_norm({1.0, sum, 2.0}, p, true, &found);
            REQUIRE((std::isnan(value) ? std::isnan(norm) : norm == kInf));
            REQUIRE(found == 1.0F);
          }
        }
      }
    }
  }
}

TEST_CASE("parts are added up whatever their number", "[kernels]") {
  for (const int64_t count : {1, 2, 255, 256, 257, 2048, 5000}) {
    std::vector<double> parts;
    for (int64_t i = 0; i < count; ++i) {
      parts.push_back(static_cast<double>(i + 1));
    }
    double sum = 0.0;
    kernels().sum_parts(nullptr, parts.data(), count, 2.0, &sum);
    REQUIRE(sum == static_cast<double>(count * (count + 1) / 2));
    kernels().sum_parts(nullptr, parts.data(), count, kInf, &sum);
    REQUIRE(sum == static_cast<double>(count));
    parts[count / 2] = kNan;
    for (const double p : kOrders) {
      kernels().sum_parts(nullptr, parts.data(), count, p, &sum);
      REQUIRE(std::isnan(sum));
    }
  }
}

TEST_CASE("norms of ranks are finished on devices", "[kernels]") {
  float found = 7.0F;
  REQUIRE(device_norm({9.0, 16.0}, 2.0, false, &found) == 5.0);
  REQUIRE(found == 0.0F);
  REQUIRE(device_norm({9.0, 16.0}, 1.0, false, nullptr) == 25.0);
  REQUIRE(device_norm({9.0, 16.0}, kInf, false, nullptr) == 16.0);
  REQUIRE(near(device_norm({11.0, 16.0}, 3.0, false, nullptr), 3.0));
  REQUIRE(device_norm({2.0}, 2.0, false, nullptr) == std::sqrt(2.0));
  REQUIRE(device_norm({2.0}, 2.0, true, nullptr) == static_cast<float>(std::sqrt(2.0)));
  REQUIRE(device_norm({1e200}, 2.0, false, &found) == 1e100);
  REQUIRE(found == 0.0F);
  REQUIRE(device_norm({1e200}, 2.0, true, &found) == kInf); // in fp32
  REQUIRE(found == 1.0F);

  // Rank by rank; more norms than a block has threads.
  constexpr int64_t kNorms = 300;
  std::vector<double> sums(2 * kNorms);
  for (int64_t g = 0; g < kNorms; ++g) {
    sums[g] = static_cast<double>(9 * g * g);
    sums[kNorms + g] = static_cast<double>(16 * g * g);
  }
  std::vector<double> norms(kNorms);
  kernels().finish_norms(nullptr, sums.data(), 2, kNorms, 2.0, true, norms.data(), &found);
  for (int64_t g = 0; g < kNorms; ++g) {
    REQUIRE(norms[g] == static_cast<double>(5 * g));
  }
  REQUIRE(found == 0.0F);
  sums[kNorms + 290] = kNan;
  kernels().finish_norms(nullptr, sums.data(), 2, kNorms, 2.0, true, norms.data(), &found);
  REQUIRE(std::isnan(norms[290]));
  REQUIRE(found == 1.0F);
}

TEST_CASE("clip factors on devices are torch's in fp32", "[kernels]") {
  for (const double max_norm : {0.1, 1.0, 3.0, kInf}) {
    for (const double norm : {0.0, 0.05, 0.7, 1.0, 3.5, 1e20, kInf, static_cast<double>(kNan)}) {
      double factor = 7.0;
      kernels().clip_factor(nullptr, &norm, max_norm, &factor);
      const at::Tensor total = at::full({}, norm, at::kFloat) + 1e-6;
      const at::Tensor expected = (at::full({}, max_norm, at::kFloat) / total).clamp_max(1.0);
      INFO(max_norm << " by " << norm);
      if (expected.isnan().item<bool>()) {
        REQUIRE(std::isnan(factor));
      } else {
        REQUIRE(factor == expected.item<double>());
      }
    }
  }
}

TEST_CASE("steps are counted on devices, and those left out", "[kernels]") {
  std::vector<int64_t> steps(301);
  for (size_t i = 0; i < steps.size(); ++i) {
    steps[i] = static_cast<int64_t>(i);
  }
  const std::vector<int64_t> start = steps;
  int64_t skipped = 0;
  const float found = 1.0F;
  const float none = 0.0F;
  kernels().begin_step(nullptr, steps.data(), 300, &found, &skipped);
  kernels().begin_step(nullptr, steps.data(), 300, &found, nullptr);
  REQUIRE(steps == start);
  REQUIRE(skipped == 1);
  kernels().begin_step(nullptr, steps.data(), 300, &none, &skipped);
  kernels().begin_step(nullptr, steps.data(), 300, nullptr, nullptr);
  for (size_t i = 0; i < 300; ++i) {
    REQUIRE(steps[i] == start[i] + 2);
  }
  REQUIRE(steps[300] == start[300]);
  REQUIRE(skipped == 1);
}
