// The optimizers' rules bit for bit against their formulas in ATen's elementwise
// operations: every type, gradients and copies of other types beside fp32 masters,
// special values among all; by every instruction set, on any threads, cut anywhere.

#include <algorithm>
#include <array>
#include <cmath>

#include "catch.h"
#include "kernel_values.h"

#include <ATen/Dispatch.h>

using namespace kernel_values;

namespace {

using State = std::vector<at::Tensor>; // the parameter first

// Rounded as IEEE has it; ATen's own may come from a library of vector functions.
at::Tensor root_of(const at::Tensor& x) {
  const at::Tensor root = x.clone();
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "root_of", [&] {
    auto* const values = root.mutable_data_ptr<scalar_t>();
    std::transform(values, values + x.numel(), values, [](scalar_t y) { return std::sqrt(y); });
  });
  return root;
}

// ---- the formulas: `state` and `g` of the compute type ----

State formula(State state, at::Tensor g, const AdamArguments& rule) {
  at::Tensor &p = state[0], &m = state[1], &v = state[2];
  g = rule.maximize ? -g : g;
  if (rule.weight_decay != 0.0 && rule.decoupled) {
    p = p * (1.0 - rule.lr * rule.weight_decay);
  } else if (rule.weight_decay != 0.0) {
    g = g + p * rule.weight_decay;
  }
  const bool wide = p.scalar_type() == at::kDouble;
  const double keep1 = 1.0 - rule.beta1;
  const double forget1 = wide ? 1.0 - keep1 : 1.0F - static_cast<float>(keep1);
  m = rule.beta1 > 0.5 ? m + (g - m) * keep1 : g - (g - m) * forget1;
  v = v * rule.beta2 + g * (1.0 - rule.beta2) * g;
  if (state.size() == 4) {
    state[3] = at::maximum(state[3], v);
  }
  const auto step = static_cast<double>(rule.step);
  const double inverse_root = 1.0 / std::sqrt(1.0 - std::pow(rule.beta2, step));
  const at::Tensor denominator = root_of(state.back()) * inverse_root + rule.eps;
  p = p - m * (rule.lr / (1.0 - std::pow(rule.beta1, step))) / denominator;
  return state;
}

State formula(State state, at::Tensor g, const SgdArguments& rule) {
  at::Tensor& p = state[0];
  g = rule.maximize ? -g : g;
  if (rule.weight_decay != 0.0) {
    g = g + p * rule.weight_decay;
  }
  at::Tensor update = g;
  if (state.size() == 2) {
    at::Tensor& buffer = state[1];
    buffer = rule.first_step ? g : buffer * rule.momentum + g * (1.0 - rule.dampening);
    update = rule.nesterov ? g + buffer * rule.momentum : buffer;
  }
  p = p - update * rule.lr;
  return state;
}

State formula(State state, at::Tensor g, const LionArguments& rule) {
  at::Tensor &p = state[0], &m = state[1];
  g = rule.maximize ? -g : g;
  const at::Tensor direction = m * rule.beta1 + g * (1.0 - rule.beta1);
  const at::Tensor sign = at::where(direction.isnan(), direction, direction.sign());
  p = p * (1.0 - rule.lr * rule.weight_decay) - sign * rule.lr;
  m = m * rule.beta2 + g * (1.0 - rule.beta2);
  return state;
}

// ---- the kernels ----

void* state_of(const State& state, size_t index) {
  return index < state.size() ? element(state[index]) : nullptr;
}

struct Step {
  Types types;
  State state;
  at::Tensor gradient;
  at::Tensor copy;

  Copy to() const {
    return types.copies ? Copy{types.copy_type, element(copy)} : Copy{};
  }
  AdamBuffers buffers(const AdamArguments&) const {
    return {
        element(state[0]),
        types.grad_type,
        element(gradient),
        element(state[1]),
        element(state[2]),
        state_of(state, 3),
        to()};
  }
  SgdBuffers buffers(const SgdArguments&) const {
    return {element(state[0]), types.grad_type, element(gradient), state_of(state, 1), to()};
  }
  LionBuffers buffers(const LionArguments&) const {
    return {element(state[0]), types.grad_type, element(gradient), element(state[1]), to()};
  }

  void run(const InstructionSet& set, int64_t begin, int64_t end, const AdamArguments& rule) const {
    set.adam(types.type, buffers(rule), begin, end, rule);
  }
  void run(const InstructionSet& set, int64_t begin, int64_t end, const SgdArguments& rule) const {
    set.sgd(types.type, buffers(rule), begin, end, rule);
  }
  void run(const InstructionSet& set, int64_t begin, int64_t end, const LionArguments& rule) const {
    set.lion(types.type, buffers(rule), begin, end, rule);
  }
};

// `size` tensors of state; squares are not negative.
Step make_step(const Types& types, int64_t count, size_t size) {
  Step step{types, {}, with_special_values(count, types.grad_type, 1), {}};
  for (size_t i = 0; i < size; ++i) {
    const at::Tensor x = with_special_values(count, types.type, i + 2);
    step.state.push_back(i < 2 ? x : x.abs());
  }
  step.copy = at::full({count}, 7.0, scalar_type(types.copy_type));
  return step;
}

Step copy_of(const Step& step) {
  Step copy = step;
  for (at::Tensor& tensor : copy.state) {
    tensor = tensor.clone();
  }
  copy.copy = step.copy.clone();
  return copy;
}

template <typename Arguments>
Step expected_of(const Step& step, const Arguments& rule) {
  const auto compute = compute_type(step.types.type);
  Step expected = step;
  for (at::Tensor& tensor : expected.state) {
    tensor = tensor.to(compute);
  }
  expected.state = formula(expected.state, step.gradient.to(compute), rule);
  if (step.types.copies) {
    expected.copy = expected.state[0].to(scalar_type(step.types.copy_type));
  }
  for (at::Tensor& tensor : expected.state) {
    tensor = tensor.to(scalar_type(step.types.type));
  }
  return expected;
}

void require_same(const Step& step, const Step& expected) {
  for (size_t i = 0; i < step.state.size(); ++i) {
    INFO("state " << i);
    REQUIRE(same_values(step.state[i], expected.state[i]));
  }
  REQUIRE(same_values(step.copy, expected.copy));
}

// Odd counts and tails of every length class; 1537 is three chunks and one.
template <typename Arguments>
void check(const Arguments& rule, size_t size) {
  std::mt19937 generator(7);
  for (const Types& types : all_types()) {
    for (const int64_t count : {0, 1, 17, 511, 1537}) {
      const Step step = make_step(types, count, size);
      const Step expected = expected_of(step, rule);
      for (const InstructionSet& set : instruction_sets()) {
        INFO(
            set.name << ", " << count << " of " << scalar_type(types.type) << ", gradient "
                     << scalar_type(types.grad_type) << ", copy " << types.copies << ' '
                     << scalar_type(types.copy_type));
        const Step whole = copy_of(step);
        whole.run(set, 0, count, rule);
        require_same(whole, expected);
        const Step pieces = copy_of(step);
        const auto cuts = random_cuts(count, generator);
        for (size_t i = 0; i + 1 < cuts.size(); ++i) {
          pieces.run(set, cuts[i], cuts[i + 1], rule);
        }
        require_same(pieces, expected);
      }
    }
  }
}

constexpr std::array<bool, 2> kBoth = {false, true};

} // namespace

TEST_CASE("adam, bit for bit", "[kernels]") {
  for (const size_t size : {3, 4}) { // 4: amsgrad
    for (const bool maximize : kBoth) {
      for (const bool decoupled : kBoth) {
        for (const double beta1 : {0.0, 0.25, 0.9}) {
          check(AdamArguments{1e-2, beta1, 0.99, 1e-8, 0.1, decoupled, 3, maximize}, size);
        }
      }
    }
    check(AdamArguments{}, size);
  }
}

TEST_CASE("sgd, bit for bit", "[kernels]") {
  for (const bool maximize : kBoth) {
    for (const double decay : {0.0, 0.1}) {
      check(SgdArguments{.lr = 0.1, .weight_decay = decay, .maximize = maximize}, 1);
      for (const bool first : kBoth) {
        check(SgdArguments{0.1, 0.9, 0.25, decay, false, first, maximize}, 2);
        check(SgdArguments{0.1, 0.9, 0.0, decay, true, first, maximize}, 2);
      }
    }
  }
}

TEST_CASE("lion, bit for bit", "[kernels]") {
  for (const bool maximize : kBoth) {
    check(LionArguments{1e-2, 0.9, 0.99, 0.1, maximize}, 2);
  }
  check(LionArguments{}, 2);
}

TEST_CASE("lion's sign of nothing is nothing", "[kernels]") {
  const at::Tensor p = at::tensor({1.0F, 1.0F, 1.0F, 1.0F, -0.0F});
  const at::Tensor m = at::tensor({0.0F, -0.0F, 1.0F, kNan, 0.0F});
  const at::Tensor g = at::tensor({0.0F, -0.0F, -1.0F, 1.0F, 0.0F});
  const LionBuffers buffers{element(p), Type::f32, element(g), element(m)};
  lion(Type::f32, buffers, 5, {.lr = 0.5, .beta1 = 0.5, .beta2 = 0.5});
  REQUIRE(same_values(p, at::tensor({1.0F, 1.0F, 1.0F, kNan, -0.0F})));
  REQUIRE(same_values(m, at::tensor({0.0F, -0.0F, 0.0F, kNan, 0.0F})));
}

TEST_CASE("amsgrad keeps the largest square", "[kernels]") {
  const auto scalar = [](float value) { return at::full({1}, value); };
  const at::Tensor p = scalar(0.0F);
  const at::Tensor m = scalar(0.0F);
  const at::Tensor v = scalar(0.0F);
  const at::Tensor largest = scalar(0.0F);
  float before = 0.0F;
  for (const float gradient : {4.0F, 0.0F, 0.0F, 8.0F, 1.0F}) {
    const at::Tensor g = scalar(gradient);
    const AdamBuffers buffers{
        element(p), Type::f32, element(g), element(m), element(v), element(largest)};
    adam(Type::f32, buffers, 1, {.beta2 = 0.5});
    before = std::max(before, v.item<float>());
    REQUIRE(largest.item<float>() == before);
  }
  REQUIRE(v.item<float>() < before);
}

TEST_CASE("mixed steps give the same bits on any number of threads", "[kernels]") {
  const int64_t count = 100003;
  for (const Types types :
       {Types{Type::f32, Type::bf16, true, Type::bf16},
        Types{Type::f32, Type::f16, true, Type::f16}}) {
    const AdamArguments adam_rule{.weight_decay = 0.1, .step = 3};
    const SgdArguments sgd_rule{.momentum = 0.9, .first_step = false};
    const LionArguments lion_rule{.weight_decay = 0.1};
    const Step start = make_step(types, count, 4);
    const Step halves{types, {start.state[0], start.state[1]}, start.gradient, start.copy};
    for (const int threads : {1, 2, 3}) {
      at::set_num_threads(threads);
      const Step one = copy_of(start);
      adam(types.type, one.buffers(adam_rule), count, adam_rule);
      require_same(one, expected_of(start, adam_rule));
      const Step two = copy_of(halves);
      sgd(types.type, two.buffers(sgd_rule), count, sgd_rule);
      require_same(two, expected_of(halves, sgd_rule));
      const Step three = copy_of(halves);
      lion(types.type, three.buffers(lion_rule), count, lion_rule);
      require_same(three, expected_of(halves, lion_rule));
    }
    at::set_num_threads(2);
  }
}

TEST_CASE("steps of types that don't go together are refused", "[kernels]") {
  const at::Tensor x = at::zeros({4}, at::kDouble);
  const LionBuffers wide{element(x), Type::f64, element(x), element(x)};
  REQUIRE_THROWS(lion(Type::f32, wide, 4, {}));
  const LionBuffers narrow{element(x), Type::bf16, element(x), element(x)};
  REQUIRE_THROWS(lion(Type::f16, narrow, 4, {}));
  const LionBuffers copied{
      element(x), Type::bf16, element(x), element(x), {Type::bf16, element(x)}};
  REQUIRE_THROWS(lion(Type::bf16, copied, 4, {}));
}
