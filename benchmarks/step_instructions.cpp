// Steps of many tiny layers on one rank, for callgrind: without it this program
// measures nothing. instructions.py starts it and reads what callgrind wrote, one
// part for each variant, named by it.
//
//     valgrind --tool=callgrind --instr-atstart=no step_instructions LAYERS WARM STEPS [VARIANT...]

#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <valgrind/callgrind.h>

#include <zero/optim/zero_optimizer.h>

#include "arguments.h"

namespace {

constexpr int64_t kWidth = 32;
constexpr int64_t kSamples = 8;

struct Options {
  int64_t layers = 0;
  int64_t warm = 0;
  int64_t steps = 0;
  std::vector<std::string> variants;
};

// A model's optimizer, as far as a step needs it.
struct Stepper {
  std::function<void()> step;
  std::function<void()> zero_grad;
};

torch::nn::Sequential make_model(int64_t layers) {
  torch::nn::Sequential model;
  for (int64_t layer = 0; layer < layers; ++layer) {
    model->push_back(torch::nn::Linear(kWidth, kWidth));
  }
  return model;
}

// What torch.optim.AdamW(fused=True) calls, without its Python: one call for all parameters.
class FusedAdamW {
 public:
  explicit FusedAdamW(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    for (const auto& parameter : parameters_) {
      moments_.push_back(at::zeros_like(parameter));
      squares_.push_back(at::zeros_like(parameter));
      steps_.push_back(at::zeros({}));
    }
  }

  void step() {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    gradients.reserve(parameters_.size());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      gradients.push_back(parameters_[i].grad());
      steps_[i].add_(1);
    }
    at::_fused_adamw_(
        parameters_,
        gradients,
        moments_,
        squares_,
        {},
        steps_,
        /*lr=*/1e-3,
        /*beta1=*/0.9,
        /*beta2=*/0.999,
        /*weight_decay=*/1e-2,
        /*eps=*/1e-8,
        /*amsgrad=*/false,
        /*maximize=*/false);
  }

  void zero_grad() {
    for (auto& parameter : parameters_) {
      parameter.mutable_grad().reset();
    }
  }

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> moments_;
  std::vector<at::Tensor> squares_;
  std::vector<at::Tensor> steps_;
};

template <typename Optimizer>
Stepper stepper_of(std::shared_ptr<Optimizer> optimizer) {
  return {[optimizer] { optimizer->step(); }, [optimizer] { optimizer->zero_grad(); }};
}

Stepper make_stepper(const std::string& variant, torch::nn::Sequential& model) {
  if (variant == "plain") {
    return stepper_of(
        std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions()));
  }
  if (variant == "plain_fused") {
    return stepper_of(std::make_shared<FusedAdamW>(model->parameters()));
  }
  for (int64_t stage = 0; stage < 4; ++stage) {
    if (variant == "zero" + std::to_string(stage)) {
      zero::Options options;
      options.stage = stage;
      options.min_unit_numel = 0; // each layer is a unit
      return stepper_of(std::make_shared<zero::ZeroOptimizer>(*model, options));
    }
  }
  throw std::invalid_argument("no variant " + variant);
}

// Functions of their own, so that callgrind tells their costs apart.
[[gnu::noinline]] at::Tensor run_forward(torch::nn::Sequential& model, const at::Tensor& input) {
  return model->forward(input).sum();
}

[[gnu::noinline]] void run_backward(const at::Tensor& loss) {
  loss.backward();
}

[[gnu::noinline]] void run_step(const Stepper& stepper) {
  stepper.step();
}

[[gnu::noinline]] void run_zero_grad(const Stepper& stepper) {
  stepper.zero_grad();
}

void run_steps(
    torch::nn::Sequential& model,
    const at::Tensor& input,
    const Stepper& stepper,
    int64_t steps) {
  for (int64_t i = 0; i < steps; ++i) {
    run_backward(run_forward(model, input));
    run_step(stepper);
    run_zero_grad(stepper);
  }
}

void measure(const std::string& variant, const Options& options) {
  auto model = make_model(options.layers);
  const auto input = at::ones({kSamples, kWidth});
  const auto stepper = make_stepper(variant, model);
  run_steps(model, input, stepper, options.warm);
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
  run_steps(model, input, stepper, options.steps);
  CALLGRIND_DUMP_STATS_AT(variant.c_str());
  CALLGRIND_STOP_INSTRUMENTATION;
}

Options parse(int argc, char** argv) {
  if (argc < 4) {
    throw std::invalid_argument("usage: step_instructions LAYERS WARM STEPS [VARIANT...]");
  }
  using zero::benchmarks::number;
  Options options{number(argv[1]), number(argv[2]), number(argv[3]), {argv + 4, argv + argc}};
  if (options.variants.empty()) {
    options.variants = {"plain", "plain_fused", "zero0", "zero1", "zero2", "zero3"};
  }
  return options;
}

} // namespace

int main(int argc, char** argv) {
  try {
    at::set_num_threads(1);
    const auto options = parse(argc, argv);
    for (const auto& variant : options.variants) {
      measure(variant, options);
    }
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "step_instructions: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
