// The kernels beside what torch offers for the same work, on one thread: AdamW over
// fp32, AdamW over fp32 masters with gradients and weights of 16 bits, the same over
// many small parameters, and the gradients' norm. kernels.py starts it and prints what
// it writes, a JSON document.
//
//   build/bench_kernels ROUNDS ELEMENTS...

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <exception>
#include <functional>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/version.h>

#include "csrc/kernels/kernels.h"

namespace {

namespace kernels = zero::kernels;
using Call = std::function<void()>;

constexpr int64_t kTensors = 1000; // of the case of many
constexpr int64_t kElements = 1000; // of each of them
constexpr int64_t kStride = 1008; // whole cache lines, as in Zero's buffers
constexpr int64_t kStep = 1000; // so that no call's number changes the others' work
constexpr int64_t kElementsTimed = int64_t{1} << 21; // a round: short, since others may interrupt
constexpr double kLr = 1e-3;
constexpr double kDecay = 1e-2;

struct Way {
  std::string name;
  Call call;
};

struct Case {
  std::string name;
  int64_t tensors;
  int64_t elements; // of all of them
  double bytes; // that one pass has to read and write, by element
  std::vector<Way> ways;
};

kernels::Type type_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? kernels::Type::f32
      : dtype == at::kHalf   ? kernels::Type::f16
                             : kernels::Type::bf16;
}

// One set for both ways, so that none has the caches to itself.
struct Training {
  Training(int64_t count, at::ScalarType dtype, int64_t tensors)
      : param(at::randn({count})),
        grad(at::randn({count})),
        exp_avg(at::randn({count}) * 0.1),
        exp_avg_sq(at::rand({count})),
        low_grad(grad.to(dtype)),
        weight(param.to(dtype)),
        tensors(tensors) {}

  // The list of parameters that lie in a flat buffer.
  std::vector<at::Tensor> list(const at::Tensor& flat) const {
    std::vector<at::Tensor> views;
    for (int64_t i = 0; i < tensors; ++i) {
      views.push_back(tensors == 1 ? flat : flat.narrow(0, i * kStride, kElements));
    }
    return views;
  }

  // With fp32 masters beside weights of 16 bits.
  bool mixed() const {
    return weight.scalar_type() != at::kFloat;
  }

  at::Tensor param, grad, exp_avg, exp_avg_sq; // fp32
  at::Tensor low_grad, weight; // of the type that computes
  int64_t tensors;
};

// ---- the ways ----

Call with_torch(const Training& x) {
  const auto params = x.list(x.param);
  const auto grads = x.list(x.grad);
  const auto low_grads = x.list(x.low_grad);
  const auto weights = x.list(x.weight);
  const auto averages = x.list(x.exp_avg);
  const auto squares = x.list(x.exp_avg_sq);
  const std::vector<at::Tensor> steps(x.tensors, at::full({}, kStep, at::kFloat));
  return [=, mixed = x.mixed()] {
    if (mixed) {
      at::_foreach_copy_(grads, low_grads);
    }
    at::_fused_adamw_(
        params, grads, averages, squares, {}, steps, kLr, 0.9, 0.999, kDecay, 1e-8, false, false);
    if (mixed) {
      at::_foreach_copy_(weights, params);
    }
  };
}

Call with_zero(const Training& x) {
  const auto type = type_of(x.weight.scalar_type());
  const kernels::AdamBuffers buffers{
      .param = x.param.mutable_data_ptr(),
      .grad_type = type,
      .grad = x.low_grad.const_data_ptr(),
      .exp_avg = x.exp_avg.mutable_data_ptr(),
      .exp_avg_sq = x.exp_avg_sq.mutable_data_ptr(),
      .copy = {type, x.mixed() ? x.weight.mutable_data_ptr() : nullptr}};
  return [=, count = x.param.numel()] {
    kernels::adam(
        kernels::Type::f32, buffers, count, {.lr = kLr, .weight_decay = kDecay, .step = kStep});
  };
}

Case adamw_case(at::ScalarType dtype, int64_t count, int64_t tensors) {
  const Training x(count, dtype, tensors);
  // Where torch computes in fp32 only, it and the kernel read the same gradient.
  x.grad.copy_(x.low_grad);
  const auto size = static_cast<double>(at::elementSize(dtype));
  return {
      std::string("adamw ") + c10::toString(dtype) + (x.mixed() ? ", fp32 masters" : ""),
      tensors,
      tensors == 1 ? count : tensors * kElements,
      6 * 4.0 + size + (x.mixed() ? size : 0),
      {{"torch", with_torch(x)}, {"zero", [x, call = with_zero(x)] { call(); }}}};
}

// Roughly: torch's norm of fp16 is off by more than a hundredth.
void check_norm(double norm, double expected) {
  if (!(std::abs(norm - expected) <= 0.05 * expected)) {
    throw std::runtime_error("expected a norm of " + std::to_string(expected));
  }
}

Case norm_case(at::ScalarType dtype, int64_t count) {
  const auto x = at::randn({count}).to(dtype);
  const double expected = at::linalg_vector_norm(x.to(at::kDouble), 2).item<double>();
  const auto torch = [=] { check_norm(at::linalg_vector_norm(x, 2).item<double>(), expected); };
  const auto zero = [=] {
    kernels::ExactSum sum;
    kernels::accumulate_norm(type_of(dtype), x.const_data_ptr(), count, 2.0, sum);
    check_norm(std::sqrt(sum.total()), expected);
  };
  const auto bytes = static_cast<double>(x.element_size());
  const auto name = std::string("norm ") + c10::toString(dtype);
  return {name, 1, count, bytes, {{"torch", torch}, {"zero", zero}}};
}

// Unscaling gradients and taking their norm; a factor of 1 leaves them as they are.
Case scaled_norm_case(at::ScalarType dtype, int64_t count) {
  const auto x = at::randn({count}).to(dtype);
  const double expected = at::linalg_vector_norm(x.to(at::kDouble), 2).item<double>();
  const auto torch = [=] {
    x.mul_(1.0);
    check_norm(at::linalg_vector_norm(x, 2).item<double>(), expected);
  };
  const auto zero = [=] {
    auto* const data = x.mutable_data_ptr();
    kernels::ExactSum sum;
    kernels::scale_and_accumulate_norm(type_of(dtype), data, 1.0, count, 2.0, sum);
    check_norm(std::sqrt(sum.total()), expected);
  };
  const auto bytes = 2.0 * static_cast<double>(x.element_size());
  const auto name = std::string("scale + norm ") + c10::toString(dtype);
  return {name, 1, count, bytes, {{"torch", torch}, {"zero", zero}}};
}

// ---- one case ----

// Both ways change the parameters alike.
void check_adamw(at::ScalarType dtype) {
  std::vector<Training> results;
  for (const auto& with : {with_torch, with_zero}) {
    at::manual_seed(1);
    results.emplace_back(1009, dtype, 1);
    results.back().grad.copy_(results.back().low_grad);
    with(results.back())();
  }
  if (!at::allclose(results[0].param, results[1].param, 1e-5, 1e-6) ||
      !at::allclose(results[0].weight, results[1].weight, 1e-2, 1e-3)) {
    throw std::runtime_error("torch and Zero gave different parameters");
  }
}

double seconds_of(const Call& call, int64_t calls) {
  call(); // not timed: the way before left the caches
  const auto began = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) {
    call();
  }
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
  return spent.count() / static_cast<double>(calls);
}

// The ways take turns.
std::string run(const Case& work, int64_t rounds) {
  const int64_t calls = std::max<int64_t>(1, kElementsTimed / work.elements);
  std::vector<std::ostringstream> seconds(work.ways.size());
  for (int64_t round = 0; round < rounds; ++round) {
    for (size_t way = 0; way < work.ways.size(); ++way) {
      seconds[way] << (round == 0 ? "" : ", ") << seconds_of(work.ways[way].call, calls);
    }
  }
  std::ostringstream json;
  json << "{\"case\": \"" << work.name << "\", \"tensors\": " << work.tensors
       << ", \"elements\": " << work.elements << ", \"calls\": " << calls
       << ", \"bytes\": " << work.bytes * static_cast<double>(work.elements) << ", \"seconds\": {";
  for (size_t way = 0; way < work.ways.size(); ++way) {
    json << (way == 0 ? "\"" : ", \"") << work.ways[way].name << "\": [" << seconds[way].str()
         << "]";
  }
  json << "}}";
  return json.str();
}

// ---- all of them ----

// Made one at a time: large ones would not fit beside each other.
std::vector<std::function<Case()>> cases_of(const std::vector<int64_t>& sizes) {
  std::vector<std::function<Case()>> cases;
  const auto dtypes = {at::kFloat, at::kBFloat16, at::kHalf};
  for (const int64_t count : sizes) {
    for (const auto dtype : dtypes) {
      cases.emplace_back([=] { return adamw_case(dtype, count, 1); });
    }
  }
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    cases.emplace_back([=] { return adamw_case(dtype, kTensors * kStride, kTensors); });
  }
  for (const int64_t count : sizes) {
    for (const auto dtype : dtypes) {
      cases.emplace_back([=] { return norm_case(dtype, count); });
      cases.emplace_back([=] { return scaled_norm_case(dtype, count); });
    }
  }
  return cases;
}

int64_t number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1) {
    throw std::invalid_argument("expected a number from 1 on, got " + std::string(text));
  }
  return value;
}

void measure(int argc, char** argv) {
  if (argc < 3) {
    throw std::invalid_argument("usage: bench_kernels ROUNDS ELEMENTS...");
  }
  const int64_t rounds = number(argv[1]);
  std::vector<int64_t> sizes;
  for (int i = 2; i < argc; ++i) {
    sizes.push_back(number(argv[i]));
  }
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    check_adamw(dtype);
  }
  std::cout << "{\"torch\": \"" << TORCH_VERSION << "\", \"rounds\": " << rounds
            << ", \"cases\": [";
  const char* separator = "\n ";
  for (const auto& make : cases_of(sizes)) {
    std::cout << separator << run(make(), rounds) << std::flush;
    separator = ",\n ";
  }
  std::cout << "\n]}\n";
}

} // namespace

int main(int argc, char** argv) {
  try {
    at::set_num_threads(1);
    measure(argc, argv);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "bench_kernels: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
