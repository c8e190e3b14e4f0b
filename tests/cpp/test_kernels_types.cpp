// Kernels between buffers of two types, and those that look at or change one buffer,
// against ATen's operations and plain arithmetic, by every instruction set.

#include <cmath>
#include <functional>

#include "catch.h"
#include "kernel_values.h"

using namespace kernel_values;

namespace {

const std::vector<int64_t> kSizes = {0, 1, 17, 511, 1537};

// Calls run(begin, end) for the stretches between random cuts.
void in_pieces(int64_t count, const std::function<void(int64_t, int64_t)>& run) {
  std::mt19937 generator(11);
  const auto cuts = random_cuts(count, generator);
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    run(cuts[i], cuts[i + 1]);
  }
}

// fp64 rounded once to the 16 bits of a type, in plain arithmetic.
double round_once(double x, Type type) {
  if (!std::isfinite(x) || x == 0.0) {
    return x;
  }
  const bool bf16 = type == Type::bf16;
  int exponent = 0;
  std::frexp(x, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - (bf16 ? 8 : 11), bf16 ? -133 : -24));
  const double rounded = std::nearbyint(x / unit) * unit;
  const double largest = bf16 ? 0x1.FEp127 : 65504.0;
  return std::abs(rounded) > largest ? std::copysign(kInfinity, x) : rounded;
}

at::Tensor convert_reference(const at::Tensor& from, Type to) {
  if (from.scalar_type() != at::kDouble || to == Type::f32 || to == Type::f64) {
    return from.to(scalar_type(to));
  }
  const at::Tensor rounded = from.clone();
  auto* const values = rounded.mutable_data_ptr<double>();
  for (int64_t i = 0; i < rounded.numel(); ++i) {
    values[i] = round_once(values[i], to);
  }
  return rounded.to(scalar_type(to));
}

// Every value of 16 bits; of the others, values near those, half way between two of
// them and a little beside, and some of any magnitude.
at::Tensor values_to_convert(Type type) {
  const at::Tensor patterns = at::arange(65536, at::kInt).to(at::kUInt16);
  const at::Tensor bf16 = patterns.view(at::kBFloat16);
  const at::Tensor f16 = patterns.view(at::kHalf);
  if (type == Type::bf16 || type == Type::f16) {
    return type == Type::bf16 ? bf16 : f16;
  }
  std::vector<at::Tensor> all;
  for (const at::Tensor& half : {bf16, f16}) {
    const at::Tensor x = half.to(scalar_type(type));
    const at::Tensor next = at::cat({half.slice(0, 1), half.slice(0, 0, 1)}).to(x.scalar_type());
    const at::Tensor middle = x + (next - x) * 0.5;
    const double beside = type == Type::f64 ? 0x1p-40 : 0x1p-22;
    for (const at::Tensor& y : {x, middle, middle * (1.0 + beside), middle * (1.0 - beside)}) {
      all.push_back(y);
    }
  }
  std::mt19937_64 generator(3);
  std::vector<double> any;
  for (int i = 0; i < 10000; ++i) {
    const auto exponent = static_cast<int>(generator() % 360) - 180;
    any.push_back(std::ldexp(static_cast<double>(generator() >> 11), exponent - 53));
  }
  all.push_back(at::tensor(any, at::kDouble).to(scalar_type(type)));
  return at::cat(all);
}

} // namespace

TEST_CASE("conversions round once, whatever the types", "[kernels]") {
  for (const Type from_type : kTypes) {
    const at::Tensor from = values_to_convert(from_type);
    const int64_t count = from.numel();
    for (const Type to_type : kTypes) {
      const at::Tensor expected = convert_reference(from, to_type);
      INFO("from " << scalar_type(from_type) << " to " << scalar_type(to_type));
      const at::Tensor to = at::empty_like(expected);
      convert(from_type, element(from), to_type, element(to), count);
      REQUIRE(same_values(to, expected));
      for (const InstructionSet& set : instruction_sets()) {
        for (const int64_t size : kSizes) {
          const at::Tensor part = at::full({size + 1}, 7.0, scalar_type(to_type));
          in_pieces(size, [&](int64_t begin, int64_t end) {
            set.convert(from_type, element(from), to_type, element(part), begin, end);
          });
          REQUIRE(same_values(part.narrow(0, 0, size), expected.narrow(0, 0, size)));
          REQUIRE(part[size].item<double>() == 7.0); // nothing past the end
        }
        to.fill_(7.0);
        set.convert(from_type, element(from), to_type, element(to), 0, count);
        REQUIRE(same_values(to, expected));
      }
    }
    const at::Tensor same = from.clone(); // over itself
    convert(from_type, element(same), from_type, element(same), count);
    REQUIRE(same_bits(same, from));
  }
  // Rounded by way of fp32, this would become a tie, and then 1.
  const at::Tensor wide = at::full({1}, 1.0 + 0x1p-8 + 0x1p-40, at::kDouble);
  const at::Tensor narrow = at::empty({1}, at::kBFloat16);
  convert(Type::f64, element(wide), Type::bf16, element(narrow), 1);
  REQUIRE(narrow.item<double>() == 1.0 + 0x1p-7);
}

TEST_CASE("gradients of every type accumulate in fp32", "[kernels]") {
  for (const Type type : kTypes) {
    for (const int64_t count : {0, 1, 17, 511, 1537, 100003}) {
      const at::Tensor from = with_special_values(count, type, 1);
      const at::Tensor start = with_special_values(count, Type::f32, 2);
      const at::Tensor expected = start + from.to(at::kFloat);
      at::Tensor to = start.clone();
      accumulate(type, element(from), to.mutable_data_ptr<float>(), count);
      REQUIRE(same_values(to, expected));
      for (const InstructionSet& set : instruction_sets()) {
        to = start.clone();
        in_pieces(count, [&](int64_t begin, int64_t end) {
          set.accumulate(type, element(from), to.mutable_data_ptr<float>(), begin, end);
        });
        REQUIRE(same_values(to, expected));
      }
    }
  }
}

TEST_CASE("inputs of 16 bits are reduced into fp32", "[kernels]") {
  for (const Type type : {Type::bf16, Type::f16}) {
    for (const int64_t count : kSizes) {
      for (int64_t ranks = 1; ranks <= 10; ++ranks) {
        std::vector<at::Tensor> inputs;
        std::vector<const void*> pointers;
        at::Tensor sum;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          inputs.push_back(with_special_values(count, type, rank + 1));
          pointers.push_back(inputs.back().const_data_ptr());
          const at::Tensor wide = inputs.back().to(at::kFloat);
          sum = rank == 0 ? wide : sum + wide;
        }
        const at::Tensor quotient = sum / 3.0;
        const at::Tensor addend = with_special_values(count, Type::f32, 50);
        for (const InstructionSet& set : instruction_sets()) {
          INFO(set.name << ", " << ranks << " ranks of " << scalar_type(type) << ", " << count);
          const at::Tensor out = at::empty({count});
          const at::Tensor over = addend.clone();
          Reduction plain{type, pointers.data(), ranks, Type::f32, element(out), nullptr, 3.0};
          Reduction added{type, pointers.data(), ranks, Type::f32, element(over), element(over)};
          added.divisor = 3.0;
          in_pieces(count, [&](int64_t begin, int64_t end) {
            set.reduce_ranks(plain, begin, end);
            set.reduce_ranks(added, begin, end);
          });
          REQUIRE(same_values(out, quotient));
          REQUIRE(same_values(over, addend + quotient));
        }
      }
    }
  }
  const at::Tensor x = at::zeros({4});
  const void* input = x.const_data_ptr();
  REQUIRE_THROWS(reduce_ranks({Type::f32, &input, 1, Type::bf16, element(x)}, 4));
  REQUIRE_THROWS(reduce_ranks({Type::f64, &input, 1, Type::f32, element(x)}, 4));
}

TEST_CASE("clamp is torch's", "[kernels]") {
  const std::vector<std::pair<double, double>> bounds = {
      {-0.5, 0.75}, {-1.0 / 3.0, 1e4}, {-kInfinity, 0.1}, {0.1, kInfinity}, {1.0, -1.0}};
  for (const Type type : kTypes) {
    for (const int64_t count : kSizes) {
      const at::Tensor start = with_special_values(count, type, 1);
      for (const auto& [low, high] : bounds) {
        const at::Tensor expected = start.clamp(low, high);
        at::Tensor x = start.clone();
        clamp(type, element(x), low, high, count);
        REQUIRE(same_values(x, expected));
        for (const InstructionSet& set : instruction_sets()) {
          x = start.clone();
          in_pieces(count, [&, low = low, high = high](int64_t begin, int64_t end) {
            set.clamp(type, element(x), low, high, begin, end);
          });
          REQUIRE(same_values(x, expected));
        }
      }
    }
  }
}

TEST_CASE("the first value that is not finite is found", "[kernels]") {
  for (const Type type : kTypes) {
    for (const int64_t count : {0, 1, 17, 511, 1537, 100003}) {
      at::Tensor x = random(count, type, 1);
      if (count > 2) {
        x[0] = type == Type::f16 ? 65504.0 : 3e38;
        x[1] = -0x1p-149;
      }
      REQUIRE(first_nonfinite(type, element(x), count) == -1);
      for (const int64_t index : {0L, 1L, 16L, 510L, 512L, 1536L, 70000L, 100002L}) {
        if (index >= count) {
          continue;
        }
        for (const float value : {kNan, -kNan, kInfinity, -kInfinity}) {
          const at::Tensor y = x.clone();
          y[index] = value;
          y[count - 1] = kInfinity; // a later one
          for (const int threads : {1, 3}) {
            at::set_num_threads(threads);
            REQUIRE(first_nonfinite(type, element(y), count) == index);
          }
          for (const InstructionSet& set : instruction_sets()) {
            REQUIRE(set.first_nonfinite(type, element(y), 0, count) == index);
            REQUIRE(set.first_nonfinite(type, element(y), 0, index) == index); // the end
          }
        }
      }
    }
  }
  at::set_num_threads(2);
}

TEST_CASE("scaled and summed in one pass, the bits are those of two", "[kernels]") {
  for (const Type type : kTypes) {
    for (const int64_t count : {0, 1, 17, 511, 2049, 100003}) {
      for (const double p : {1.0, 2.0, 3.0, static_cast<double>(kInfinity)}) {
        for (const bool special : {false, true}) {
          const at::Tensor start =
              special ? with_special_values(count, type, 1) : random(count, type, 1);
          const at::Tensor expected = start.clone();
          ExactSum two;
          two.add(0.5);
          scale(type, element(expected), 1.0 / 3.0, count);
          accumulate_norm(type, element(expected), count, p, two);
          for (const int threads : {1, 2, 3}) {
            at::set_num_threads(threads);
            const at::Tensor x = start.clone();
            ExactSum one;
            one.add(0.5);
            scale_and_accumulate_norm(type, element(x), 1.0 / 3.0, count, p, one);
            REQUIRE(same_values(x, expected));
            REQUIRE(one.wire().limbs == two.wire().limbs);
            REQUIRE(one.wire().flags == two.wire().flags);
            REQUIRE((one.maximum() == two.maximum() || std::isnan(one.maximum())));
            REQUIRE(std::isnan(one.maximum()) == std::isnan(two.maximum()));
          }
        }
      }
    }
  }
  at::set_num_threads(2);
}
