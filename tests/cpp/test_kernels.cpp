// Kernels against plain arithmetic, and the same bits however they are run.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "catch.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "csrc/kernels/kernels_impl.h"

using namespace zero::kernels;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

const std::vector<int64_t> kSizes = {0, 1, 15, 16, 17, 1000, 100003};

at::ScalarType scalar_type(Type type) {
  switch (type) {
    case Type::f32:
      return at::kFloat;
    case Type::f64:
      return at::kDouble;
    case Type::bf16:
      return at::kBFloat16;
    default:
      return at::kHalf;
  }
}

const std::vector<Type> kTypes = {Type::f32, Type::f64, Type::bf16, Type::f16};

at::Tensor random(int64_t count, Type type, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn({count}, generator, at::kFloat).to(scalar_type(type));
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
      (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

void* element(const at::Tensor& tensor, int64_t index) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + index * tensor.itemsize();
}

} // namespace

TEST_CASE("reduce_ranks sums in order, divides and adds", "[kernels]") {
  for (const Type type : kTypes) {
    // fp32 arithmetic for types of 16 bits, the type's own else.
    const at::ScalarType compute = type == Type::f64 ? at::kDouble : at::kFloat;
    for (const int64_t count : kSizes) {
      for (int64_t ranks = 1; ranks <= 6; ++ranks) {
        std::vector<at::Tensor> inputs;
        std::vector<const void*> pointers;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          inputs.push_back(random(count, type, 10 * rank + 1));
          pointers.push_back(inputs.back().const_data_ptr());
        }
        at::Tensor sum = inputs[0].to(compute);
        for (int64_t rank = 1; rank < ranks; ++rank) {
          sum = sum + inputs[rank].to(compute);
        }
        const at::Tensor quotient = sum / static_cast<double>(ranks);
        const at::Tensor addend = random(count, type, 99);
        at::Tensor out = at::empty({count}, scalar_type(type));
        reduce_ranks(type, out.mutable_data_ptr(), pointers.data(), ranks, nullptr, ranks, count);
        REQUIRE(same_bits(out, quotient.to(scalar_type(type))));
        const at::Tensor added = (addend.to(compute) + quotient).to(scalar_type(type));
        // In place: over the addend, and over an input.
        at::Tensor over = addend.clone();
        reduce_ranks(
            type,
            over.mutable_data_ptr(),
            pointers.data(),
            ranks,
            over.const_data_ptr(),
            ranks,
            count);
        REQUIRE(same_bits(over, added));
        reduce_ranks(
            type,
            inputs.back().mutable_data_ptr(),
            pointers.data(),
            ranks,
            addend.const_data_ptr(),
            ranks,
            count);
        REQUIRE(same_bits(inputs.back(), added));
      }
    }
  }
}

TEST_CASE("conversions of 16 bits are ATen's, for every value", "[kernels]") {
  std::vector<float> values = {0.0F, -0.0F, kInfinity, -kInfinity, 65504.0F, 65519.9F, 65520.0F,
                               1e-8F, 6e-8F, -3e-5F, 6.1e-5F, 1e30F, 1e-40F, 0x1p-149F};
  std::mt19937 bits(1);
  for (int i = 0; i < 200000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(bits()));
    values.push_back(std::isnan(value) ? 1.0F : value);
  }
  const at::Tensor wide = at::tensor(values);
  const auto count = static_cast<int64_t>(values.size());
  for (const Type type : {Type::bf16, Type::f16}) {
    // x * 1 loads and stores; fp32 values reach the store through 0 + sum / 1.
    at::Tensor narrow = wide.to(scalar_type(type));
    const at::Tensor expected = narrow.clone();
    scale(type, narrow.mutable_data_ptr(), 1.0, count);
    REQUIRE(same_bits(narrow, expected));
    const double half = 0.5; // another value to be rounded
    scale(type, narrow.mutable_data_ptr(), half, count);
    const at::Tensor halved = (expected.to(at::kFloat) * half).to(scalar_type(type));
    REQUIRE(same_bits(narrow, halved));
  }
  for (const Type type : {Type::bf16, Type::f16}) {
    at::Tensor nan = at::full({16}, kNan, scalar_type(type));
    scale(type, nan.mutable_data_ptr(), 1.0, 16);
    REQUIRE(nan.isnan().all().item<bool>());
  }
}

namespace {

struct Moments {
  at::Tensor p, m, v;
};

// The rule's formulas in ATen's elementwise operations, in fp32 or fp64.
Moments
adam_reference(const Moments& old, const at::Tensor& gradient, const AdamArguments& arguments) {
  const at::ScalarType compute =
      old.p.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor p = old.p.to(compute);
  at::Tensor g = gradient.to(compute);
  if (arguments.decoupled) {
    p = p * (1.0 - arguments.lr * arguments.weight_decay);
  } else {
    g = g + p * arguments.weight_decay;
  }
  const auto step = static_cast<double>(arguments.step);
  const at::Tensor m = old.m.to(compute) + (g - old.m.to(compute)) * (1.0 - arguments.beta1);
  const at::Tensor v = old.v.to(compute) * arguments.beta2 + g * g * (1.0 - arguments.beta2);
  const double correction1 = 1.0 - std::pow(arguments.beta1, step);
  const double correction2 = 1.0 - std::pow(arguments.beta2, step);
  p = p - m * (arguments.lr / correction1) / (v.sqrt() / std::sqrt(correction2) + arguments.eps);
  return {p.to(old.p.scalar_type()), m.to(old.p.scalar_type()), v.to(old.p.scalar_type())};
}

double tolerance(Type type) {
  return type == Type::f64 ? 1e-13 : type == Type::f32 ? 2e-6 : type == Type::bf16 ? 1e-2 : 2e-3;
}

} // namespace

TEST_CASE("adam follows its formulas over several steps", "[kernels]") {
  for (const Type type : kTypes) {
    for (const bool decoupled : {true, false}) {
      for (const int64_t count : kSizes) {
        Moments state{
            random(count, type, 1),
            at::zeros({count}, scalar_type(type)),
            at::zeros({count}, scalar_type(type))};
        for (int64_t step = 1; step <= 3; ++step) {
          const AdamArguments arguments{1e-2, 0.9, 0.99, 1e-4, 0.1, decoupled, step};
          const at::Tensor gradient = random(count, type, 50 + step);
          const Moments expected = adam_reference(state, gradient, arguments);
          adam(
              type,
              state.p.mutable_data_ptr(),
              gradient.const_data_ptr(),
              state.m.mutable_data_ptr(),
              state.v.mutable_data_ptr(),
              count,
              arguments);
          const double close = tolerance(type);
          REQUIRE(at::allclose(state.p, expected.p, close, close));
          REQUIRE(at::allclose(state.m, expected.m, close, close));
          REQUIRE(at::allclose(state.v, expected.v, close, close));
        }
      }
    }
  }
}

TEST_CASE("sgd follows its formulas", "[kernels]") {
  for (const Type type : kTypes) {
    const at::ScalarType compute = type == Type::f64 ? at::kDouble : at::kFloat;
    for (const bool nesterov : {false, true}) {
      const int64_t count = 1001;
      const double dampening = nesterov ? 0.0 : 0.25;
      at::Tensor p = random(count, type, 1);
      at::Tensor buffer = at::zeros({count}, scalar_type(type));
      at::Tensor b;
      for (int64_t step = 0; step < 3; ++step) {
        const at::Tensor gradient = random(count, type, 20 + step);
        const at::Tensor g = gradient.to(compute) + p.to(compute) * 0.1;
        b = step == 0 ? g : buffer.to(compute) * 0.9 + g * (1.0 - dampening);
        const at::Tensor expected = p.to(compute) - (nesterov ? g + b * 0.9 : b) * 0.5;
        sgd(type,
            p.mutable_data_ptr(),
            gradient.const_data_ptr(),
            buffer.mutable_data_ptr(),
            count,
            {0.5, 0.9, dampening, 0.1, nesterov, step == 0});
        const double close = tolerance(type);
        REQUIRE(at::allclose(p.to(compute), expected, close, close));
      }
    }
    at::Tensor p = at::full({17}, 1.0, scalar_type(type));
    const at::Tensor gradient = at::full({17}, 2.0, scalar_type(type));
    sgd(type, p.mutable_data_ptr(), gradient.const_data_ptr(), nullptr, 17, {.lr = 0.25});
    REQUIRE(p.eq(0.5).all().item<bool>());
  }
}

TEST_CASE("the same bits however a buffer is cut", "[kernels]") {
  const int64_t count = 100003;
  for (const Type type : kTypes) {
    const at::Tensor gradient = random(count, type, 3);
    const auto block = static_cast<int64_t>(64 / gradient.itemsize());
    const AdamArguments arguments{1e-2, 0.9, 0.99, 1e-8, 0.1, true, 3};
    const auto run = [&](const std::vector<int64_t>& cuts) {
      const at::Tensor p = random(count, type, 4);
      const at::Tensor m = random(count, type, 5);
      const at::Tensor v = random(count, type, 6).abs();
      ExactSum sum;
      int64_t begin = 0;
      for (size_t i = 0; i <= cuts.size(); ++i) {
        const int64_t end = i < cuts.size() ? cuts[i] * block : count;
        adam(
            type,
            element(p, begin),
            element(gradient, begin),
            element(m, begin),
            element(v, begin),
            end - begin,
            arguments);
        accumulate_norm(type, element(gradient, begin), end - begin, 2.0, sum);
        begin = end;
      }
      return std::make_pair(at::cat({p, m, v}), sum.total());
    };
    const auto whole = run({});
    std::mt19937 generator(7);
    for (int i = 0; i < 20; ++i) {
      std::vector<int64_t> cuts;
      for (int k = 0; k < 5; ++k) {
        cuts.push_back(static_cast<int64_t>(generator() % (count / block)));
      }
      std::sort(cuts.begin(), cuts.end());
      const auto pieces = run(cuts);
      REQUIRE(same_bits(pieces.first, whole.first));
      REQUIRE(pieces.second == whole.second);
    }
    at::set_num_threads(1);
    const auto single = run({});
    at::set_num_threads(2);
    REQUIRE(same_bits(single.first, whole.first));
    REQUIRE(single.second == whole.second);
  }
}

#if defined(__x86_64__)
TEST_CASE("the same bits from every instruction set", "[kernels]") {
  const int64_t count = 1000;
  for (const Type type : kTypes) {
    const at::Tensor gradient = random(count, type, 3);
    const at::Tensor other = random(count, type, 8);
    const AdamArguments adam_arguments{1e-2, 0.9, 0.99, 1e-8, 0.1, false, 3};
    const auto run = [&](auto adam_of, auto sgd_of, auto reduce_of, auto norm_of) {
      const at::Tensor p = random(count, type, 4);
      const at::Tensor m = random(count, type, 5);
      const at::Tensor v = random(count, type, 6).abs();
      const at::Tensor out = at::zeros({count}, scalar_type(type));
      adam_of(
          type,
          element(p, 0),
          element(gradient, 0),
          element(m, 0),
          element(v, 0),
          0,
          count,
          adam_arguments);
      sgd_of(
          type, element(p, 0), element(gradient, 0), element(m, 0), 0, count, SgdArguments{0.1, 0.9});
      const void* inputs[] = {element(gradient, 0), element(other, 0)};
      reduce_of(type, element(out, 0), inputs, 2, element(p, 0), 3.0, 0, count);
      at::Tensor norms = at::zeros({3}, at::kDouble);
      int64_t at = 0;
      for (const double order : {1.0, 2.0, 3.0}) {
        ExactSum sum;
        norm_of(type, element(gradient, 0), order, 0, count, sum);
        norms[at++] = sum.total();
      }
      return at::cat({at::cat({p, m, v, out}).to(at::kDouble), norms});
    };
    const at::Tensor expected =
        run(generic::adam, generic::sgd, generic::reduce_ranks, generic::accumulate_norm);
    if (__builtin_cpu_supports("avx2")) {
      REQUIRE(same_bits(
          run(avx2::adam, avx2::sgd, avx2::reduce_ranks, avx2::accumulate_norm), expected));
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) {
      REQUIRE(same_bits(
          run(avx512::adam, avx512::sgd, avx512::reduce_ranks, avx512::accumulate_norm),
          expected));
    }
  }
}
#endif

TEST_CASE("norms equal plain ones, with special values", "[kernels]") {
  for (const Type type : kTypes) {
    for (const int64_t count : kSizes) {
      const at::Tensor x = random(count, type, 11);
      const at::Tensor wide = x.to(at::kDouble).abs();
      for (const double p : {1.0, 2.0, 3.0}) {
        ExactSum sum;
        accumulate_norm(type, x.const_data_ptr(), count, p, sum);
        REQUIRE(sum.total() == Approx(wide.pow(p).sum().item<double>()).epsilon(1e-13));
      }
      ExactSum largest;
      const double infinity = std::numeric_limits<double>::infinity();
      accumulate_norm(type, x.const_data_ptr(), count, infinity, largest);
      REQUIRE(largest.maximum() == (count == 0 ? 0.0 : wide.max().item<double>()));
    }
  }
  const auto norm = [](std::vector<float> values, double p) {
    const at::Tensor x = at::tensor(values);
    ExactSum sum;
    accumulate_norm(Type::f32, x.const_data_ptr(), x.numel(), p, sum);
    return std::isinf(p) ? sum.maximum() : sum.total();
  };
  REQUIRE(norm({1.0F, kInfinity}, 2.0) == kInfinity);
  REQUIRE(std::isnan(norm({1.0F, kNan, kInfinity}, 2.0)));
  REQUIRE(norm({-kInfinity, 1.0F}, kInfinity) == kInfinity);
  REQUIRE(std::isnan(norm({1.0F, kNan}, kInfinity)));
  REQUIRE(norm({-0.0F}, 2.0) == 0.0);
  REQUIRE(norm({0x1p-149F}, 2.0) == 0x1p-298);
  REQUIRE(norm({3.4e38F, 3.4e38F}, 2.0) == 2.0 * double(3.4e38F) * double(3.4e38F));
}

TEST_CASE("an exact sum does not depend on order", "[kernels]") {
  std::mt19937_64 generator(3);
  std::vector<double> values;
  for (int i = 0; i < 5000; ++i) {
    const auto exponent = static_cast<int>(generator() % 560) - 300;
    values.push_back(std::ldexp(static_cast<double>(generator() >> 11), exponent - 53));
  }
  const auto sum_of = [](const std::vector<double>& order, size_t split) {
    ExactSum first;
    ExactSum second;
    for (size_t i = 0; i < order.size(); ++i) {
      (i < split ? first : second).add(order[i]);
    }
    first.merge(ExactSum::from_wire(second.wire()));
    return first;
  };
  const ExactSum reference = sum_of(values, 0);
  for (int i = 0; i < 10; ++i) {
    std::shuffle(values.begin(), values.end(), generator);
    const ExactSum shuffled = sum_of(values, generator() % values.size());
    REQUIRE(shuffled.wire().limbs == reference.wire().limbs);
    REQUIRE(shuffled.total() == reference.total());
  }
}

TEST_CASE("an exact sum is exact and rounds to nearest even", "[kernels]") {
  const auto total = [](std::vector<double> values) {
    ExactSum sum;
    for (const double value : values) {
      sum.add(value);
    }
    return sum.total();
  };
  REQUIRE(total({}) == 0.0);
  REQUIRE(total({0x1p53, 1.0, 1.0}) == 0x1p53 + 2.0);
  REQUIRE(total({0x1p53, 1.0}) == 0x1p53); // a tie, to even
  REQUIRE(total({0x1p53 + 2.0, 1.0}) == 0x1p53 + 4.0);
  REQUIRE(total({0x1p53, 1.0, 0x1p-300}) == 0x1p53 + 2.0); // no longer a tie
  REQUIRE(total({0x1p300, 0x1p-300}) == 0x1p300);
  REQUIRE(total({0x1p-320}) == 0x1p-320);
  REQUIRE(total({0x1p-321}) == 0.0);
  REQUIRE(total({0x1p-1060}) == 0.0);
  REQUIRE(total({0x1p318, 0x1p318}) == 0x1p319);
  REQUIRE(std::isinf(total({0x1p319})));
  REQUIRE(std::isinf(total(std::vector<double>(5, 0x1p318 * 1.9))));
}
