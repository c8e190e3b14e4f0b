// The optimizers' steps on devices, by their bodies on the host, bit for bit against
// the CPU kernels: every type, numbers of elements around packs, buffers that start
// anywhere, and the step's number and whether it is left out in memory.

#include <array>

#include "catch.h"
#include "kernel_values.h"

#include "csrc/kernels/device_kernels.h"

using namespace kernel_values;

namespace {

constexpr std::array<bool, 2> kBoth = {false, true};
constexpr int64_t kRoom = 32; // elements before and after what a step may change

struct Buffer {
  at::Tensor all;
  int64_t count;
  int64_t offset;

  void* data() const {
    return element(all, offset);
  }
  at::Tensor values() const {
    return all.narrow(0, offset, count);
  }
};

Buffer buffer_of(const at::Tensor& values, int64_t offset) {
  const int64_t count = values.numel();
  const Buffer buffer{at::full({count + kRoom}, 7.0, values.options()), count, offset};
  buffer.values().copy_(values);
  return buffer;
}

// Where buffers start; gradients where packs can't be aligned with the others'.
struct Offsets {
  int64_t all;
  int64_t gradient;
};

// Buffers of a step: the parameter, the gradient, the copy, and states.
struct Step {
  Types types;
  std::vector<Buffer> state; // the parameter first
  Buffer gradient;
  Buffer copy;

  void* state_at(size_t index) const {
    return index < state.size() ? state[index].data() : nullptr;
  }
  Copy to() const {
    return types.copies ? Copy{types.copy_type, copy.data()} : Copy{};
  }
  AdamBuffers buffers(const AdamArguments&) const {
    return {
        state_at(0), types.grad_type, gradient.data(), state_at(1), state_at(2), state_at(3), to()};
  }
  SgdBuffers buffers(const SgdArguments&) const {
    return {state_at(0), types.grad_type, gradient.data(), state_at(1), to()};
  }
  LionBuffers buffers(const LionArguments&) const {
    return {state_at(0), types.grad_type, gradient.data(), state_at(1), to()};
  }
};

Step make_step(const Types& types, int64_t count, size_t size, Offsets offsets) {
  Step step{types, {}, {}, {}};
  for (size_t i = 0; i < size; ++i) {
    const at::Tensor x = with_special_values(count, types.type, i + 2);
    step.state.push_back(buffer_of(i < 2 ? x : x.abs(), offsets.all)); // no negative squares
  }
  step.gradient = buffer_of(with_special_values(count, types.grad_type, 1), offsets.gradient);
  step.copy = buffer_of(at::full({count}, 7.0, scalar_type(types.copy_type)), offsets.all);
  return step;
}

void run_device(
    const Step& step,
    int64_t count,
    const AdamArguments& rule,
    const StepState& state) {
  host_device_kernels().adam(nullptr, step.types.type, step.buffers(rule), count, rule, state);
}
void run_device(const Step& step, int64_t count, const SgdArguments& rule, const StepState& state) {
  host_device_kernels().sgd(nullptr, step.types.type, step.buffers(rule), count, rule, state);
}
void run_device(
    const Step& step,
    int64_t count,
    const LionArguments& rule,
    const StepState& state) {
  host_device_kernels().lion(nullptr, step.types.type, step.buffers(rule), count, rule, state);
}

// The CPU kernels take the number of the step as an argument.
void run_host(const Step& step, int64_t count, AdamArguments rule, int64_t number) {
  rule.step = number;
  adam(step.types.type, step.buffers(rule), count, rule);
}
void run_host(const Step& step, int64_t count, SgdArguments rule, int64_t number) {
  rule.first_step = number == 1;
  sgd(step.types.type, step.buffers(rule), count, rule);
}
void run_host(const Step& step, int64_t count, const LionArguments& rule, int64_t) {
  lion(step.types.type, step.buffers(rule), count, rule);
}

// Equal values, and nothing touched around them.
void require_same(const Buffer& buffer, const Buffer& expected) {
  REQUIRE(same_values(buffer.values(), expected.values()));
  const int64_t after = buffer.offset + buffer.count;
  REQUIRE(buffer.all.narrow(0, 0, buffer.offset).eq(7.0).all().item<bool>());
  REQUIRE(buffer.all.narrow(0, after, kRoom - buffer.offset).eq(7.0).all().item<bool>());
}

template <typename Arguments>
void check_count(
    const Types& types,
    const Arguments& rule,
    size_t size,
    int64_t number,
    int64_t count,
    Offsets offsets) {
  INFO(
      count << " of " << scalar_type(types.type) << ", gradient " << scalar_type(types.grad_type)
            << ", copy " << types.copies << ' ' << scalar_type(types.copy_type) << ", step "
            << number << ", from " << offsets.all << " and " << offsets.gradient);
  const Step expected = make_step(types, count, size, {0, 0});
  run_host(expected, count, rule, number);
  const Step step = make_step(types, count, size, offsets);
  const float found = 0.0F;
  run_device(step, count, rule, {&number, number % 2 == 0 ? &found : nullptr});
  for (size_t i = 0; i < size; ++i) {
    INFO("state " << i);
    require_same(step.state[i], expected.state[i]);
  }
  require_same(step.copy, expected.copy);
}

template <typename Arguments>
void check(const Arguments& rule, size_t size) {
  for (const Types& types : all_types()) {
    for (const int64_t count : {0, 1, 7, 15, 16, 17, 1000, 4099}) {
      check_count(types, rule, size, 2, count, {0, 0});
    }
    for (const int64_t number : {1, 1000}) {
      check_count(types, rule, size, number, 1000, {0, 0});
    }
    // Packs after a head of 5 elements, and of 1; and no packs at all.
    for (const Offsets offsets : {Offsets{3, 3}, Offsets{15, 15}, Offsets{0, 1}}) {
      check_count(types, rule, size, 1, 3, offsets);
      check_count(types, rule, size, 3, 1000, offsets);
    }
  }
}

template <typename Arguments>
void check_left_out(const Arguments& rule, size_t size) {
  for (const Types& types : all_types()) {
    for (const float found : {1.0F, kNan}) {
      const int64_t number = 3;
      const Step step = make_step(types, 1000, size, {0, 0});
      const Step before = make_step(types, 1000, size, {0, 0});
      run_device(step, 1000, rule, {&number, &found});
      for (size_t i = 0; i < size; ++i) {
        REQUIRE(same_bits(step.state[i].all, before.state[i].all));
      }
      REQUIRE(same_bits(step.copy.all, before.copy.all));
    }
  }
}

} // namespace

TEST_CASE("adam on devices is the CPU's, bit for bit", "[kernels]") {
  for (const size_t size : {3, 4}) { // 4: amsgrad
    for (const bool maximize : kBoth) {
      for (const bool decoupled : kBoth) {
        for (const double beta1 : {0.0, 0.9}) {
          check(AdamArguments{1e-2, beta1, 0.99, 1e-8, 0.1, decoupled, 77, maximize}, size);
        }
      }
    }
    check(AdamArguments{}, size);
  }
}

TEST_CASE("sgd on devices is the CPU's, bit for bit", "[kernels]") {
  for (const bool maximize : kBoth) {
    for (const double decay : {0.0, 0.1}) {
      check(SgdArguments{.lr = 0.1, .weight_decay = decay, .maximize = maximize}, 1);
      check(SgdArguments{0.1, 0.9, 0.25, decay, false, true, maximize}, 2);
      check(SgdArguments{0.1, 0.9, 0.0, decay, true, false, maximize}, 2);
    }
  }
}

TEST_CASE("lion on devices is the CPU's, bit for bit", "[kernels]") {
  for (const bool maximize : kBoth) {
    check(LionArguments{1e-2, 0.9, 0.99, 0.1, maximize}, 2);
  }
  check(LionArguments{}, 2);
}

TEST_CASE("large steps on devices are the CPU's", "[kernels]") {
  const int64_t count = 1 << 17;
  for (const Types types :
       {Types{Type::f32, Type::f32},
        Types{Type::bf16, Type::bf16},
        Types{Type::f32, Type::bf16, true, Type::bf16},
        Types{Type::f32, Type::f16, true, Type::f16}}) {
    check_count(types, AdamArguments{.weight_decay = 0.1}, 4, 10, count + 1, {0, 0});
    check_count(types, SgdArguments{.momentum = 0.9}, 2, 10, count + 1, {1, 1});
    check_count(types, LionArguments{}, 2, 10, count + 1, {0, 0});
  }
}

TEST_CASE("a step on a device that is left out writes nothing", "[kernels]") {
  check_left_out(AdamArguments{.weight_decay = 0.1}, 3);
  check_left_out(AdamArguments{.weight_decay = 0.1}, 4);
  check_left_out(SgdArguments{.momentum = 0.9}, 2);
  check_left_out(LionArguments{}, 2);
}

TEST_CASE("steps on devices of types that don't go together are refused", "[kernels]") {
  const int64_t number = 1;
  const at::Tensor x = at::zeros({4}, at::kDouble);
  const auto run = [&](Type type, const LionBuffers& buffers) {
    host_device_kernels().lion(nullptr, type, buffers, 4, {}, {&number});
  };
  REQUIRE_THROWS(run(Type::f32, {element(x), Type::f64, element(x), element(x)}));
  REQUIRE_THROWS(run(Type::f16, {element(x), Type::bf16, element(x), element(x)}));
  REQUIRE_THROWS(
      run(Type::bf16, {element(x), Type::bf16, element(x), element(x), {Type::bf16, element(x)}}));
}
