// Kernels against plain arithmetic in ATen's operations, and the same bits however
// they are run: by any instruction set, on any threads, over a buffer cut anywhere.
// The exact sum against sums worked out in rational arithmetic.

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "catch.h"
#include "kernel_values.h"

using namespace kernel_values;

namespace {

const std::vector<int64_t> kSizes = {0, 1, 15, 16, 17, 1000, 100003};

struct Moments {
  at::Tensor p, m, v;

  void step(Type type, const at::Tensor& gradient, const AdamArguments& rule) {
    adam(type, {element(p), type, element(gradient), element(m), element(v)}, p.numel(), rule);
  }
};

// The rule's formulas in ATen's elementwise operations, in fp32 or fp64.
Moments
adam_reference(const Moments& old, const at::Tensor& gradient, const AdamArguments& arguments) {
  const auto compute = old.p.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
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

// What every kernel of the set gives, called once for each stretch between cuts.
std::vector<at::Tensor>
run_all(const InstructionSet& set, Type type, int64_t count, const std::vector<int64_t>& cuts) {
  const at::Tensor g = with_special_values(count, type, 1);
  const at::Tensor p = with_special_values(count, type, 2);
  const at::Tensor m = random(count, type, 3);
  const at::Tensor v = random(count, type, 4).abs();
  const at::Tensor scaled = g.clone();
  const at::Tensor finite = random(count, type, 5);
  std::vector<at::Tensor> results = {p, m, v, scaled};
  std::vector<const void*> inputs;
  for (const at::Tensor& input : {g, finite, v.clone(), g, finite, p.clone(), g, g, finite, g}) {
    results.push_back(input);
    inputs.push_back(input.const_data_ptr());
  }
  std::vector<ExactSum> sums(4);
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t begin = cuts[i];
    const int64_t end = cuts[i + 1];
    for (const double beta1 : {0.9, 0.25}) {
      for (const bool decoupled : {false, true}) {
        const AdamArguments rule{1e-2, beta1, 0.99, 1e-8, 0.1, decoupled, 3};
        const AdamBuffers buffers{element(p), type, element(g), element(m), element(v)};
        set.adam(type, buffers, begin, end, rule);
      }
    }
    set.sgd(type, {element(p), type, element(g), element(m)}, begin, end, {0.1, 0.9, 0.0, 0.1});
    set.sgd(type, {element(p), type, element(g)}, begin, end, {0.1});
    set.scale(type, element(scaled), 1.0 / 3.0, begin, end);
    const double orders[] = {1.0, 2.0, 3.0, kInfinity};
    for (size_t k = 0; k < sums.size(); ++k) {
      set.accumulate_norm(type, element(k == 0 ? g : finite), orders[k], begin, end, sums[k]);
    }
  }
  for (int64_t ranks = 1; ranks <= 10; ++ranks) {
    const at::Tensor out = finite.clone();
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const void* addend = ranks % 2 == 0 ? element(out) : nullptr;
      set.reduce_ranks(
          {type, inputs.data(), ranks, type, element(out), addend, 3.0}, cuts[i], cuts[i + 1]);
    }
    results.push_back(out);
  }
  for (const ExactSum& sum : sums) {
    results.push_back(at::tensor({sum.total(), sum.maximum()}, at::kDouble));
  }
  return results;
}

} // namespace

TEST_CASE("reduce_ranks sums in order, divides and adds", "[kernels]") {
  for (const Type type : kTypes) {
    const auto compute = type == Type::f64 ? at::kDouble : at::kFloat;
    for (const int64_t count : kSizes) {
      for (int64_t ranks = 1; ranks <= 6; ++ranks) {
        std::vector<at::Tensor> inputs;
        std::vector<const void*> pointers;
        at::Tensor sum;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          inputs.push_back(random(count, type, 10 * rank + 1));
          pointers.push_back(inputs.back().const_data_ptr());
          const at::Tensor wide = inputs.back().to(compute);
          sum = rank == 0 ? wide : sum + wide;
        }
        const at::Tensor quotient = sum / static_cast<double>(ranks);
        const at::Tensor addend = random(count, type, 99);
        const auto reduce = [&](Reduction reduction) {
          reduction.divisor = static_cast<double>(ranks);
          reduce_ranks(reduction, count);
        };
        at::Tensor out = at::empty({count}, scalar_type(type));
        reduce({type, pointers.data(), ranks, type, element(out)});
        REQUIRE(same_bits(out, quotient.to(scalar_type(type))));
        const at::Tensor added = (addend.to(compute) + quotient).to(scalar_type(type));
        // In place: over the addend, and over an input.
        const at::Tensor over = addend.clone();
        reduce({type, pointers.data(), ranks, type, element(over), element(over)});
        REQUIRE(same_bits(over, added));
        const at::Tensor& last = inputs.back();
        reduce({type, pointers.data(), ranks, type, element(last), element(addend)});
        REQUIRE(same_bits(last, added));
      }
    }
  }
}

TEST_CASE("conversions of 16 bits are ATen's, for every value", "[kernels]") {
  const int64_t count = 65536;
  const at::Tensor patterns = at::arange(count, at::kInt).to(at::kUInt16);
  for (const Type type : {Type::bf16, Type::f16}) {
    const at::Tensor values = patterns.view(scalar_type(type));
    for (const float factor : {1.0F, 1.0F / 3.0F, 3.0F, 0x1p-9F, 0x1p-14F / 3.0F, 1e9F}) {
      const at::Tensor expected = (values.to(at::kFloat) * factor).to(scalar_type(type));
      for (const InstructionSet& set : instruction_sets()) {
        const at::Tensor x = values.clone();
        set.scale(type, element(x), factor, 0, count);
        REQUIRE(same_values(x, expected));
      }
    }
  }
}

TEST_CASE("adam follows its formulas over several steps", "[kernels]") {
  for (const Type type : kTypes) {
    for (const int64_t count : kSizes) {
      const at::Tensor zeros = at::zeros({count}, scalar_type(type));
      Moments state{random(count, type, 1), zeros.clone(), zeros.clone()};
      for (int64_t step = 1; step <= 4; ++step) {
        const AdamArguments arguments{1e-2, 0.9, 0.99, 1e-4, 0.1, step % 2 == 0, step};
        const at::Tensor g = random(count, type, 50 + step);
        const Moments expected = adam_reference(state, g, arguments);
        state.step(type, g, arguments);
        const double close = tolerance(type);
        REQUIRE(at::allclose(state.p, expected.p, close, close));
        REQUIRE(at::allclose(state.m, expected.m, close, close));
        REQUIRE(at::allclose(state.v, expected.v, close, close));
      }
    }
  }
}

TEST_CASE("sgd follows its formulas", "[kernels]") {
  for (const Type type : kTypes) {
    const auto compute = type == Type::f64 ? at::kDouble : at::kFloat;
    for (const bool nesterov : {false, true}) {
      const int64_t count = 1001;
      const double dampening = nesterov ? 0.0 : 0.25;
      at::Tensor p = random(count, type, 1);
      at::Tensor buffer = at::zeros({count}, scalar_type(type));
      for (int64_t step = 0; step < 3; ++step) {
        const at::Tensor gradient = random(count, type, 20 + step);
        const at::Tensor g = gradient.to(compute) + p.to(compute) * 0.1;
        const at::Tensor b = step == 0 ? g : buffer.to(compute) * 0.9 + g * (1.0 - dampening);
        const at::Tensor expected = p.to(compute) - (nesterov ? g + b * 0.9 : b) * 0.5;
        const SgdArguments rule{0.5, 0.9, dampening, 0.1, nesterov, step == 0};
        sgd(type, {element(p), type, element(gradient), element(buffer)}, count, rule);
        REQUIRE(at::allclose(p.to(compute), expected, tolerance(type), tolerance(type)));
      }
    }
    at::Tensor p = at::full({17}, 1.0, scalar_type(type));
    const at::Tensor gradient = at::full({17}, 2.0, scalar_type(type));
    sgd(type, {element(p), type, element(gradient)}, 17, {.lr = 0.25});
    REQUIRE(p.eq(0.5).all().item<bool>());
  }
}

TEST_CASE("the same bits on any number of threads, however a buffer is cut", "[kernels]") {
  const int64_t count = 100003;
  for (const Type type : kTypes) {
    const at::Tensor gradient = random(count, type, 3);
    const AdamArguments rule{1e-2, 0.9, 0.99, 1e-8, 0.1, true, 3};
    const auto run = [&](const std::vector<int64_t>& cuts) {
      const Moments state{
          random(count, type, 4), random(count, type, 5), random(count, type, 6).abs()};
      ExactSum sum;
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const int64_t begin = cuts[i];
        const int64_t size = cuts[i + 1] - begin;
        Moments{
            state.p.narrow(0, begin, size),
            state.m.narrow(0, begin, size),
            state.v.narrow(0, begin, size)}
            .step(type, gradient.narrow(0, begin, size), rule);
        accumulate_norm(type, element(gradient, begin), size, 2.0, sum);
      }
      return std::make_pair(at::cat({state.p, state.m, state.v}), sum.total());
    };
    const auto whole = run({0, count});
    for (const int threads : {1, 2, 3}) {
      at::set_num_threads(threads);
      for (const auto& cuts : {std::vector<int64_t>{0, count}, {0, 32, 64, 50016, count}}) {
        const auto pieces = run(cuts);
        REQUIRE(same_bits(pieces.first, whole.first));
        REQUIRE(pieces.second == whole.second);
      }
    }
    at::set_num_threads(2);
  }
}

TEST_CASE("the same bits from every instruction set and for every cut", "[kernels]") {
  std::mt19937 generator(5);
  for (const Type type : kTypes) {
    for (const int64_t count : kSizes) {
      const auto expected = run_all(instruction_sets().front(), type, count, {0, count});
      for (const InstructionSet& set : instruction_sets()) {
        const auto cuts = random_cuts(count, generator);
        const auto pieces = run_all(set, type, count, cuts);
        for (size_t i = 0; i < expected.size(); ++i) {
          INFO(set.name << ", " << count << " elements, result " << i);
          REQUIRE(same_values(pieces[i], expected[i]));
        }
      }
    }
  }
}

TEST_CASE("rules at their edges", "[kernels]") {
  const auto scalar = [](float value) { return at::full({1}, value); };
  const auto step = [&](float p, float gradient, const AdamArguments& rule) {
    Moments state{scalar(p), scalar(1e8F), scalar(0.0F)};
    state.step(Type::f32, scalar(gradient), rule);
    return std::make_pair(state.m.item<float>(), state.v.item<float>());
  };
  // Without memory the first moment is the gradient, however large it was.
  REQUIRE(step(0.0F, 1.0F, {.beta1 = 0.0}).first == 1.0F);
  // A square past fp32, (1 - beta2) of which is not.
  REQUIRE(step(0.0F, 1e20F, {.beta2 = 0.999}).second == Approx(1e37F));
  // No weight decay: infinite parameters don't touch the gradient.
  REQUIRE(step(kInfinity, 1.0F, {.beta1 = 0.0, .decoupled = false}).first == 1.0F);
  // A first step doesn't read its momentum buffer.
  const at::Tensor p = scalar(kInfinity);
  const at::Tensor g = scalar(2.0F);
  const at::Tensor buffer = scalar(kNan);
  const SgdBuffers buffers{element(p), Type::f32, element(g), element(buffer)};
  sgd(Type::f32, buffers, 1, {.momentum = 0.9});
  REQUIRE(buffer.item<float>() == 2.0F);
  REQUIRE(p.item<float>() == kInfinity);
}

TEST_CASE("norms equal plain ones, with special values", "[kernels]") {
  for (const Type type : kTypes) {
    for (const int64_t count : kSizes) {
      const at::Tensor x = random(count, type, 11);
      const at::Tensor wide = x.to(at::kDouble).abs();
      for (const double p : {1.0, 2.0, 3.0}) {
        ExactSum sum;
        accumulate_norm(type, element(x), count, p, sum);
        REQUIRE(sum.total() == Approx(wide.pow(p).sum().item<double>()).epsilon(1e-13));
      }
      ExactSum largest;
      accumulate_norm(type, element(x), count, kInfinity, largest);
      REQUIRE(largest.maximum() == (count == 0 ? 0.0 : wide.max().item<double>()));
    }
  }
  const auto norm = [](std::vector<float> values, double p) {
    const at::Tensor x = at::tensor(values);
    ExactSum sum;
    accumulate_norm(Type::f32, element(x), x.numel(), p, sum);
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
  REQUIRE(total({0x1p318, 0x1p318}) == 0x1p319);
  REQUIRE(std::isinf(total({0x1p319})));
  REQUIRE(std::isinf(total(std::vector<double>(5, 0x1p318 * 1.9))));
  REQUIRE(std::isinf(total({-kInfinity})));
  REQUIRE(total({-0.0, 5e-324, 0x1p-1060}) == 0.0);
  ExactSum harmonic;
  for (int k = 1; k <= 100000; ++k) {
    harmonic.add(1.0 / k);
  }
  REQUIRE(harmonic.total() == 0x1.82e27a22f3fb0p+3);
}

TEST_CASE("an exact sum tells whether all was finite", "[kernels]") {
  const auto finite = [](std::vector<double> values) {
    ExactSum sum;
    for (const double value : values) {
      sum.add(value);
    }
    // Merged and sent, it tells the same.
    ExactSum merged;
    merged.add(1.0);
    merged.merge(ExactSum::from_wire(sum.wire()));
    REQUIRE(merged.finite() == sum.finite());
    return sum.finite();
  };
  REQUIRE(finite({}));
  REQUIRE(finite({0.0, 1.0, 0x1p318, 0x1p-1074}));
  REQUIRE(!finite({1.0, kInfinity}));
  REQUIRE(!finite({kNan, 1.0}));
  REQUIRE(!finite({-kNan}));
  REQUIRE(!finite({0x1p319})); // too large
  REQUIRE(!finite(std::vector<double>(5, 0x1p318 * 1.9))); // together
  const int64_t count = 1003;
  for (const Type type : kTypes) {
    for (const double p : {0.5, 1.0, 2.0, 3.0, static_cast<double>(kInfinity)}) {
      for (const float value : {1.0F, -0.0F, 60000.0F, kNan, kInfinity, -kInfinity}) {
        for (const int64_t index : {0, 17, 1002}) {
          const at::Tensor x = random(count, type, 9);
          x[index] = value;
          ExactSum sum;
          accumulate_norm(type, element(x), count, p, sum);
          INFO("p = " << p << ", " << value << " at " << index);
          REQUIRE(sum.finite() == std::isfinite(value));
        }
      }
    }
  }
}
