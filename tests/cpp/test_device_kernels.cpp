// The elementwise kernels of devices and their sums over ranks, by their bodies on the
// host, bit for bit against the CPU kernels: every type, numbers of elements around
// packs, buffers that start anywhere.

#include <cstring>

#include "catch.h"
#include "kernel_values.h"

#include "csrc/kernels/device_kernels.h"

using namespace kernel_values;

namespace {

const std::vector<int64_t> kCounts = {0, 1, 7, 15, 16, 17, 1000, 4099};
const std::vector<int64_t> kOffsets = {0, 3, 8}; // elements

// The same values `offset` elements after an aligned place, with 7 around them.
struct Buffer {
  Buffer(const at::Tensor& values, int64_t offset)
      : all(at::full({values.numel() + 32}, 7.0, values.options())),
        values(all.narrow(0, offset, values.numel())) {
    this->values.copy_(values);
  }

  bool keeps_surroundings() const {
    const int64_t offset = values.storage_offset();
    const int64_t end = offset + values.numel();
    return all.slice(0, 0, offset).eq(7.0).all().item<bool>() &&
        all.slice(0, end).eq(7.0).all().item<bool>();
  }

  at::Tensor all;
  at::Tensor values;
};

// Subnormal values, and what is near the largest of 16 bits, among the others.
at::Tensor values_of(int64_t count, Type type, uint64_t seed) {
  const at::Tensor x = with_special_values(count, Type::f64, seed);
  const at::Tensor scale = at::arange(count, at::kInt).remainder(5);
  for (const auto& [residue, factor] :
       {std::pair{1, 0x1p-140}, std::pair{2, 0x1p-20}, std::pair{3, 30000.0}}) {
    x.masked_scatter_(scale.eq(residue), x.masked_select(scale.eq(residue)) * factor);
  }
  return x.to(scalar_type(type));
}

template <typename Run>
void for_cases(const Run& run) {
  for (const Type type : kTypes) {
    for (const int64_t count : kCounts) {
      for (const int64_t offset : kOffsets) {
        INFO(count << " of " << scalar_type(type) << " from " << offset);
        run(type, count, offset);
      }
    }
    INFO("a large one of " << scalar_type(type));
    run(type, 10007, 0);
  }
}

} // namespace

TEST_CASE("scale on devices is the CPU's, bit for bit", "[kernels]") {
  for_cases([](Type type, int64_t count, int64_t offset) {
    const at::Tensor x = values_of(count, type, 1);
    const double third = 1.0 / 3.0;
    for (const double factor : {-3.0, static_cast<double>(kInfinity)}) {
      for (const double* device_factor : {static_cast<const double*>(nullptr), &third}) {
        const Buffer buffer(x, offset);
        host_device_kernels().scale(
            nullptr, type, element(buffer.values), factor, device_factor, count);
        const at::Tensor expected = x.clone();
        scale(type, element(expected), device_factor ? factor * third : factor, count);
        REQUIRE(same_values(buffer.values, expected));
        REQUIRE(buffer.keeps_surroundings());
      }
    }
  });
}

TEST_CASE("a scale by one on a device touches nothing", "[kernels]") {
  const double half = 0.5;
  const double near_one = 1.0 + 0x1p-40; // fp32's 1
  for (const Type type : kTypes) {
    // No memory there: a read would end the test.
    host_device_kernels().scale(nullptr, type, nullptr, 1.0, nullptr, 1000);
    host_device_kernels().scale(nullptr, type, nullptr, 2.0, &half, 1000);
    if (type != Type::f64) {
      host_device_kernels().scale(nullptr, type, nullptr, 1.0, &near_one, 1000);
    }
  }
  const at::Tensor wide = at::full({1}, 2.0, at::kDouble);
  host_device_kernels().scale(nullptr, Type::f64, element(wide), 1.0, &near_one, 1);
  REQUIRE(wide.item<double>() == 2.0 * near_one);
}

TEST_CASE("clamp on devices is the CPU's, bit for bit", "[kernels]") {
  for_cases([](Type type, int64_t count, int64_t offset) {
    const at::Tensor x = values_of(count, type, 2);
    const Buffer buffer(x, offset);
    host_device_kernels().clamp(nullptr, type, element(buffer.values), -0.3, 0.7, count);
    const at::Tensor expected = x.clone();
    clamp(type, element(expected), -0.3, 0.7, count);
    REQUIRE(same_values(buffer.values, expected));
    REQUIRE(buffer.keeps_surroundings());
  });
}

TEST_CASE("conversions on devices are the CPU's, bit for bit", "[kernels]") {
  for_cases([](Type type, int64_t count, int64_t offset) {
    const at::Tensor from = values_of(count, type, 3);
    const Buffer given(from, offset);
    for (const Type to_type : kTypes) {
      INFO("to " << scalar_type(to_type));
      const at::Tensor expected = at::empty({count}, scalar_type(to_type));
      convert(type, element(from), to_type, element(expected), count);
      for (const int64_t to_offset : {offset, int64_t{0}, int64_t{5}}) {
        const Buffer to(at::zeros_like(expected), to_offset);
        host_device_kernels().convert(
            nullptr, type, element(given.values), to_type, element(to.values), count);
        REQUIRE(same_bits(to.values.contiguous(), expected));
        REQUIRE(to.keeps_surroundings());
      }
    }
  });
}

TEST_CASE("every value of 16 bits converts on devices as on the CPU", "[kernels]") {
  const at::Tensor patterns = at::arange(65536, at::kInt).to(at::kUInt16);
  for (const Type type : {Type::bf16, Type::f16}) {
    const at::Tensor from = patterns.view(scalar_type(type));
    for (const Type to_type : kTypes) {
      const at::Tensor to = at::empty({65536}, scalar_type(to_type));
      host_device_kernels().convert(nullptr, type, element(from), to_type, element(to), 65536);
      REQUIRE(same_values(to, from.to(scalar_type(to_type))));
    }
  }
}

TEST_CASE("accumulate and follow on devices are the CPU's, bit for bit", "[kernels]") {
  for_cases([](Type type, int64_t count, int64_t offset) {
    const at::Tensor held = values_of(count, Type::f32, 4);
    // Half of what is followed has stayed as it was.
    const at::Tensor stays = at::arange(count, at::kInt).remainder(2).eq(0);
    const at::Tensor from = at::where(stays, held.to(scalar_type(type)), values_of(count, type, 5));
    const Buffer given(from, offset);
    for (const int64_t to_offset : {offset, int64_t{2}}) {
      const Buffer sum(held, to_offset);
      host_device_kernels().accumulate(
          nullptr, type, element(given.values), static_cast<float*>(element(sum.values)), count);
      const at::Tensor expected_sum = held.clone();
      accumulate(type, element(from), static_cast<float*>(element(expected_sum)), count);
      REQUIRE(same_values(sum.values, expected_sum));
      REQUIRE(sum.keeps_surroundings());

      const Buffer target(held, to_offset);
      host_device_kernels().follow(
          nullptr, type, element(given.values), static_cast<float*>(element(target.values)), count);
      const at::Tensor expected = held.clone();
      follow(type, element(from), static_cast<float*>(element(expected)), count);
      REQUIRE(same_values(target.values, expected));
      REQUIRE(target.keeps_surroundings());
    }
  });
}

TEST_CASE("sums over ranks on devices are the CPU's, bit for bit", "[kernels]") {
  for_cases([](Type type, int64_t count, int64_t offset) {
    for (const int64_t ranks : {1, 3, 8}) {
      // Inputs that all start at places of packs, and that don't.
      const int64_t stride = (count + 63) / 64 * 64 + (offset == 8 ? 1 : 0);
      const at::Tensor all = values_of(ranks * stride + offset, type, 6);
      std::vector<const void*> inputs;
      for (int64_t r = 0; r < ranks; ++r) {
        inputs.push_back(element(all, offset + r * stride));
      }
      for (const Type out_type : {type, Type::f32}) {
        for (const bool adds : {false, true}) {
          if (type == Type::f64 && out_type == Type::f32) {
            continue;
          }
          INFO(ranks << " ranks to " << scalar_type(out_type) << ", adds " << adds);
          const at::Tensor expected = values_of(count, out_type, 7);
          const Buffer out(expected, offset);
          reduce_ranks(
              {type,
               inputs.data(),
               ranks,
               out_type,
               element(expected),
               adds ? element(expected) : nullptr,
               3.0},
              count);
          host_device_kernels().reduce_ranks(
              nullptr,
              {type,
               inputs[0],
               stride,
               ranks,
               out_type,
               element(out.values),
               adds ? element(out.values) : nullptr,
               3.0},
              count);
          REQUIRE(same_values(out.values, expected));
          REQUIRE(out.keeps_surroundings());
        }
      }
    }
  });
}

TEST_CASE("a sum over ranks on a device may replace its first input", "[kernels]") {
  const int64_t count = 1000;
  const at::Tensor x = at::arange(2 * count, at::kFloat);
  const at::Tensor expected = x.narrow(0, 0, count) + x.narrow(0, count, count);
  host_device_kernels().reduce_ranks(
      nullptr, {Type::f32, element(x), count, 2, Type::f32, element(x)}, count);
  REQUIRE(same_bits(x.narrow(0, 0, count), expected));
  REQUIRE_THROWS(
      host_device_kernels().reduce_ranks(
          nullptr, {Type::f64, element(x), count, 2, Type::f32, element(x)}, count));
}
