// Native rules through the optimizer, at stages 0 to 3, against torch::optim or the
// formula in ATen's operations.

#include "catch.h"
#include "engine_cases.h"

using namespace zero::test;

namespace {

struct Free : torch::nn::Module {
  at::Tensor add(const std::string& name, at::Tensor value) {
    return register_parameter(name, std::move(value));
  }
};

constexpr int64_t kSteps = 4;

at::Tensor start() {
  return torch::linspace(-1.0, 1.0, 37);
}

// A rank's gradient; the mean over ranks changes sign and size from step to step.
at::Tensor gradient_of(int64_t step, int64_t rank) {
  return torch::randn({37}, seeded(17 * step + rank)) * (step == 1 ? 10.0 : 1.0);
}

at::Tensor mean_of(int64_t step, int64_t ranks) {
  at::Tensor sum = gradient_of(step, 0);
  for (int64_t rank = 1; rank < ranks; ++rank) {
    sum = sum + gradient_of(step, rank);
  }
  return sum / static_cast<double>(ranks);
}

using Expected = std::function<State(int64_t ranks)>; // the weight after each step

void check(const zero::Rule& rule, const Expected& expected) {
  for (const int64_t ranks : {1, 2, 3}) {
    const State want = expected(ranks);
    for (int64_t stage = 0; stage <= 3; ++stage) {
      INFO("stage " << stage << ", " << ranks << " ranks");
      run_ranks(ranks, [&](int64_t rank, const auto& group) {
        const auto model = std::make_shared<Free>();
        const at::Tensor w = model->add("w", start());
        zero::ZeroOptimizer optimizer(*model, {.stage = stage, .timeout = 20.0}, rule, group);
        for (int64_t step = 0; step < kSteps; ++step) {
          (w * gradient_of(step, rank)).sum().backward();
          optimizer.step();
          optimizer.zero_grad();
          const at::Tensor got = zero::full_param(optimizer, w);
          require(
              torch::allclose(got, want[step], 1e-5, 1e-6),
              "the weight of step " + std::to_string(step));
        }
      });
    }
  }
}

// torch::optim has no `maximize`: its gradients are negated.
template <typename Optimizer, typename OptimizerOptions>
Expected torchs(const OptimizerOptions& options, double sign) {
  return [=](int64_t ranks) {
    State weights;
    const at::Tensor w = start().requires_grad_();
    Optimizer optimizer(std::vector<at::Tensor>{w}, options);
    for (int64_t step = 0; step < kSteps; ++step) {
      w.mutable_grad() = mean_of(step, ranks) * sign;
      optimizer.step();
      weights.push_back(w.detach().clone());
    }
    return weights;
  };
}

} // namespace

TEST_CASE("amsgrad and maximize are those of torch", "[rules]") {
  for (const bool maximize : {false, true}) {
    const double sign = maximize ? -1.0 : 1.0;
    for (const bool amsgrad : {false, true}) {
      check(
          zero::AdamW{.lr = 0.1, .weight_decay = 0.1, .amsgrad = amsgrad, .maximize = maximize},
          torchs<torch::optim::AdamW>(
              torch::optim::AdamWOptions(0.1).weight_decay(0.1).amsgrad(amsgrad), sign));
      check(
          zero::Adam{.lr = 0.1, .amsgrad = amsgrad, .maximize = maximize},
          torchs<torch::optim::Adam>(torch::optim::AdamOptions(0.1).amsgrad(amsgrad), sign));
    }
    check(
        zero::SGD{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .maximize = maximize},
        [=](int64_t ranks) {
          State weights;
          at::Tensor w = start();
          at::Tensor buffer;
          for (int64_t step = 0; step < kSteps; ++step) {
            const at::Tensor gradient = mean_of(step, ranks) * sign + 0.1 * w;
            buffer = step == 0 ? gradient : 0.9 * buffer + gradient;
            w = w - 0.1 * buffer;
            weights.push_back(w);
          }
          return weights;
        });
  }
}

TEST_CASE("Lion steps by the sign of an interpolated moment", "[rules]") {
  for (const bool maximize : {false, true}) {
    check(
        zero::Lion{.lr = 0.01, .betas = {0.8, 0.95}, .weight_decay = 0.1, .maximize = maximize},
        [=](int64_t ranks) {
          State weights;
          at::Tensor w = start();
          at::Tensor moment = torch::zeros({37});
          for (int64_t step = 0; step < kSteps; ++step) {
            const at::Tensor gradient = mean_of(step, ranks) * (maximize ? -1.0 : 1.0);
            w = w - 0.01 * (torch::sign(0.8 * moment + 0.2 * gradient) + 0.1 * w);
            moment = 0.95 * moment + 0.05 * gradient;
            weights.push_back(w);
          }
          return weights;
        });
  }
  const zero::Lion defaults;
  REQUIRE(defaults.lr == 1e-4);
  REQUIRE(defaults.betas == std::array<double, 2>{0.9, 0.99});
  REQUIRE(defaults.weight_decay == 0.0);
  REQUIRE(contains(error_of([] { zero::validate(zero::Lion{.betas = {0.9, 1.0}}); }), "betas[1]"));
}

TEST_CASE("state tensors are the rule's own, and theory counts them", "[rules]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](int64_t, const auto& group) {
      const auto held = [&](const zero::Rule& rule, const std::vector<std::string>& names) {
        const auto model = std::make_shared<Free>();
        const at::Tensor w = model->add("w", torch::ones({64}));
        zero::ZeroOptimizer optimizer(*model, {.stage = stage, .timeout = 20.0}, rule, group);
        w.sum().backward();
        optimizer.step();
        const auto state = zero::full_state(optimizer, w);
        require(state.size() == names.size() + 1, "these state tensors and the step");
        for (const std::string& name : names) {
          require(state.at(name).sizes() == w.sizes(), name + " of the parameter's shape");
        }
        const auto report = optimizer.engine().report();
        const auto bytes = static_cast<int64_t>(names.size()) * 256 / (stage == 0 ? 1 : 2);
        require(report.theory_held.optimizer_state == bytes, "theory of the state");
        require(report.held.optimizer_state == bytes, "state as theory says");
      };
      held(zero::Lion{}, {"exp_avg"});
      held(zero::AdamW{.amsgrad = true}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"});
      held(zero::Adam{}, {"exp_avg", "exp_avg_sq"});
      held(zero::SGD{.maximize = true}, {});
    });
  }
}

TEST_CASE("amsgrad is switched on before the first step, or refused by name", "[rules]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](int64_t, const auto& group) {
      const auto model = std::make_shared<Free>();
      const at::Tensor w = model->add("w", torch::ones({64}));
      zero::ZeroOptimizer optimizer(
          *model, {.stage = stage, .timeout = 20.0}, zero::AdamW{.lr = 0.1}, group);
      w.sum().backward();
      optimizer.step();
      const at::Tensor before = zero::full_param(optimizer, w);
      std::get<zero::AdamW>(optimizer.rule()).amsgrad = true;
      const std::string error = error_of([&] { optimizer.step(); });
      require(contains(error, "'w'") && contains(error, "amsgrad"), "a named error, got " + error);
      require(torch::equal(zero::full_param(optimizer, w), before), "nothing changed");
      std::get<zero::AdamW>(optimizer.rule()).amsgrad = false;
      optimizer.step();
      require(!torch::equal(zero::full_param(optimizer, w), before), "a step");
      optimizer.rule() = zero::Lion{};
      require(
          contains(error_of([&] { optimizer.step(); }), "keep their optimizer rule"), "refused");
    });
  }
}
