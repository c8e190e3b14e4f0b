// LossScaler against the rule of torch.amp.GradScaler, with ranks as threads, and the
// policies for gradients that are not finite.

#include "catch.h"
#include "engine_cases.h"

#include <cmath>
#include <limits>

#include <zero/optim/elementwise.h>

using namespace zero::test;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Two parameters of which "b" comes second in the model and first in memory; across
// the ranks' shards.
struct Pair : torch::nn::Module {
  Pair() {
    a = register_parameter("a", torch::ones({40}));
    b = register_parameter("b", torch::ones({40}));
  }
  at::Tensor a;
  at::Tensor b;
};

zero::Options options_of(int64_t stage, const std::string& on_nonfinite = "ignore") {
  return {.stage = stage, .min_unit_numel = 0, .timeout = 20.0, .on_nonfinite = on_nonfinite};
}

template <typename Case>
void at_each_stage(const Case& run) {
  for (int64_t ranks = 1; ranks <= 3; ++ranks) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      INFO("stage " << stage << ", " << ranks << " ranks");
      run_ranks(ranks, [&](int64_t rank, const auto& group) { run(stage, rank, ranks, group); });
    }
  }
}

// The gradient of the mean over ranks is `value` everywhere, but for one element of
// each parameter in `poisoned` on the last rank.
at::Tensor loss_of(
    const Pair& model,
    double value,
    const std::vector<std::string>& poisoned,
    int64_t rank,
    int64_t ranks,
    double poison = kInfinity) {
  at::Tensor sum = torch::zeros({});
  for (const auto& item : model.named_parameters()) {
    at::Tensor weight = torch::full({40}, value);
    const bool hit = std::find(poisoned.begin(), poisoned.end(), item.key()) != poisoned.end();
    if (hit && rank == ranks - 1) {
      weight[39] = poison;
    }
    sum = sum + (item.value() * weight).sum();
  }
  return sum;
}

State whole(zero::ZeroOptimizer& optimizer, const Pair& model) {
  return {zero::full_param(optimizer, model.a), zero::full_param(optimizer, model.b)};
}

bool filled(const at::Tensor& tensor, double value) {
  return torch::allclose(tensor, torch::full_like(tensor, value), 1e-6, 1e-6);
}

} // namespace

TEST_CASE("the scale grows and falls by GradScaler's rule", "[scaler]") {
  at_each_stage([](int64_t stage, int64_t rank, int64_t ranks, const auto& group) {
    Pair model;
    zero::ZeroOptimizer optimizer(model, options_of(stage), zero::SGD{.lr = 1e-3}, group);
    zero::LossScaler scaler(
        {.init_scale = 1024.0, .growth_factor = 4.0, .backoff_factor = 0.25, .growth_interval = 3});
    // By arithmetic: two good steps, a bad one, three good ones, a good one.
    const std::vector<bool> good = {true, true, false, true, true, true, true};
    const std::vector<double> scales = {1024, 1024, 256, 256, 256, 1024, 1024};
    for (size_t i = 0; i < good.size(); ++i) {
      const State before = whole(optimizer, model);
      const std::vector<std::string> poisoned =
          good[i] ? std::vector<std::string>{} : std::vector<std::string>{"b"};
      scaler.scale(loss_of(model, 3.0, poisoned, rank, ranks)).backward();
      require(scaler.step(optimizer) == good[i], "a step exactly where gradients are finite");
      scaler.update();
      require(scaler.get_scale() == scales[i], "scale " + std::to_string(scales[i]));
      require(equal(whole(optimizer, model), before) == !good[i], "weights left alone, or not");
      optimizer.zero_grad();
    }
    require(scaler.state().growth_tracker == 1, "one good step since the scale grew");
    const auto report = optimizer.engine().report();
    require(report.steps == 6 && report.nonfinite_steps == 1, "six steps and one left out");
    require(report.nonfinite_parameter == "b", "its parameter, got " + report.nonfinite_parameter);
    require(contains(zero::report(optimizer), "non-finite gradient: 1"), "a line in the report");
  });
}

TEST_CASE("a NaN on one rank leaves the step out on all", "[scaler]") {
  at_each_stage([](int64_t stage, int64_t rank, int64_t ranks, const auto& group) {
    Pair model;
    zero::ZeroOptimizer optimizer(model, options_of(stage), zero::AdamW{}, group);
    zero::LossScaler scaler;
    const double nan = std::numeric_limits<double>::quiet_NaN();
    scaler.scale(loss_of(model, 1.0, {"a", "b"}, rank, ranks, nan)).backward();
    require(!scaler.step(optimizer), "no step");
    scaler.update();
    require(scaler.get_scale() == 32768.0, "half of 65536");
    require(equal(whole(optimizer, model), {torch::ones({40}), torch::ones({40})}), "the weights");
    require(zero::full_state(optimizer, model.a).empty(), "no state");
    require(optimizer.engine().report().nonfinite_parameter == "a", "the first in the model");
  });
}

TEST_CASE("unscaling and clipping in one pass is unscaling, then clipping", "[scaler]") {
  at_each_stage([](int64_t stage, int64_t rank, int64_t ranks, const auto& group) {
    for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
      Pair model;
      zero::ZeroOptimizer optimizer(model, options_of(stage), zero::SGD{}, group);
      std::vector<double> norms;
      std::vector<at::Tensor> gradients;
      for (const bool together : {false, true}) {
        zero::LossScaler scaler({.init_scale = 4096.0});
        scaler.scale(loss_of(model, 0.3, {}, rank, ranks)).backward();
        if (together) {
          norms.push_back(scaler.unscale_and_clip_(optimizer, 0.1, p));
        } else {
          scaler.unscale_(optimizer);
          norms.push_back(optimizer.clip_grad_norm_(0.1, p));
        }
        gradients.push_back(zero::full_grad(optimizer, model.a));
        require(
            contains(error_of([&] { scaler.unscale_(optimizer); }), "once between"),
            "gradients unscaled once");
        optimizer.zero_grad();
      }
      const double want = std::isinf(p) ? 0.3 : 0.3 * std::pow(80.0, 1.0 / p);
      require(norms[0] == norms[1] && norms[0] == Approx(want), "the norm of what is unscaled");
      require(torch::equal(gradients[0], gradients[1]), "the same bits");
      require(filled(gradients[0], 0.3 * 0.1 / want), "clipped to 0.1");
    }
  });
}

TEST_CASE("an overflow seen while clipping leaves the step out", "[scaler]") {
  at_each_stage([](int64_t stage, int64_t rank, int64_t ranks, const auto& group) {
    Pair model;
    zero::ZeroOptimizer optimizer(model, options_of(stage), zero::SGD{}, group);
    zero::LossScaler scaler;
    scaler.scale(loss_of(model, 1.0, {"b"}, rank, ranks)).backward();
    require(std::isinf(scaler.unscale_and_clip_(optimizer, 1.0)), "an infinite norm");
    require(!scaler.step(optimizer), "no step");
    scaler.update();
    optimizer.zero_grad();
    scaler.scale(loss_of(model, 1.0, {}, rank, ranks)).backward();
    require(scaler.unscale_and_clip_(optimizer, 100.0) == Approx(std::sqrt(80.0)), "finite again");
    require(scaler.step(optimizer), "a step");
    scaler.update();
  });
}

TEST_CASE("a scaler checks its options, its calls and its state", "[scaler]") {
  require(contains(error_of([] { zero::LossScaler({.init_scale = 0.0}); }), "init_scale"), "");
  require(contains(error_of([] { zero::LossScaler({.growth_factor = 1.0}); }), "growth"), "");
  require(contains(error_of([] { zero::LossScaler({.backoff_factor = 1.0}); }), "backoff"), "");
  require(contains(error_of([] { zero::LossScaler({.growth_interval = 0}); }), "interval"), "");
  zero::LossScaler scaler({.growth_interval = 1});
  REQUIRE(contains(error_of([&] { scaler.update(); }), "before update()"));
  scaler.update(8.0);
  REQUIRE(scaler.get_scale() == 8.0);
  scaler.load_state({.scale = 0x1p127, .growth_tracker = 0});
  Pair model;
  zero::ZeroOptimizer optimizer(model, options_of(1), zero::SGD{});
  model.a.sum().backward();
  scaler.step(optimizer);
  REQUIRE(contains(error_of([&] { scaler.step(optimizer); }), "a second"));
  scaler.update();
  REQUIRE(scaler.get_scale() == 0x1p127); // what would overflow does not grow
  const at::Tensor half = torch::ones({}, torch::kHalf);
  REQUIRE(zero::LossScaler().scale(half).item<double>() == 65536.0);
  REQUIRE(zero::LossScaler({.enabled = false}).scale(half).is_same(half));
  REQUIRE(zero::LossScaler({.enabled = false}).step(optimizer));
}

TEST_CASE("what on_nonfinite says, all ranks do", "[nonfinite]") {
  at_each_stage([](int64_t stage, int64_t rank, int64_t ranks, const auto& group) {
    for (const bool native : {true, false}) {
      for (const std::string policy : {"ignore", "skip", "raise"}) {
        Pair model;
        const zero::Options options = options_of(stage, policy);
        auto optimizer = native
            ? zero::ZeroOptimizer(model, options, zero::Adam{.lr = 0.1}, group)
            : zero::ZeroOptimizer(
                  model,
                  options,
                  zero::elementwise<torch::optim::Adam>(torch::optim::AdamOptions(0.1)),
                  group);
        loss_of(model, 1.0, {"a", "b"}, rank, ranks).backward();
        bool stepped = false;
        const std::string error = error_of([&] { stepped = optimizer.step(); });
        require(stepped == (policy == "ignore"), "a step when ignored, with " + policy);
        require(
            contains(error, "parameter 'a'") == (policy == "raise"), "the first name, " + error);
        const State weights = whole(optimizer, model);
        require(filled(weights[1].slice(0, 0, 39), stepped ? 0.9 : 1.0), "finite ones as usual");
        require(torch::isfinite(weights[1][39]).item<bool>() != stepped, "the other");
        const auto report = optimizer.engine().report();
        require(report.steps == (stepped ? 1 : 0), "steps");
        require(report.nonfinite_steps == (stepped ? 0 : 1), "steps left out");
        optimizer.zero_grad();
        loss_of(model, 1.0, {}, rank, ranks).backward();
        require(optimizer.step(), "a step that is taken");
        require(filled(whole(optimizer, model)[0].slice(0, 0, 39), stepped ? 0.8 : 0.9), "by 0.1");
      }
    }
  });
}

TEST_CASE("clipping by value, norms of groups and norms that are not finite", "[nonfinite]") {
  at_each_stage([](int64_t stage, int64_t rank, int64_t ranks, const auto& group) {
    Pair model;
    zero::ZeroOptimizer optimizer(
        model,
        options_of(stage),
        std::vector<zero::ParameterGroup>{
            {{model.a}, zero::SGD{}}, {{model.b}, zero::SGD{}}, {{}, zero::SGD{}}},
        group);
    (model.a * 3.0 - model.b * 4.0).sum().backward();
    const auto groups = optimizer.grad_norms(1.0);
    const std::vector<double> norms(groups.begin(), groups.end());
    require(norms == std::vector<double>{120.0, 160.0, 0.0}, "norms of three groups");
    require(optimizer.grad_norm(1.0) == 280.0, "and of all");
    optimizer.clip_grad_value_(3.5);
    require(filled(zero::full_grad(optimizer, model.a), 3.0), "3 is within 3.5");
    require(filled(zero::full_grad(optimizer, model.b), -3.5), "-4 is not");
    require(contains(error_of([&] { optimizer.clip_grad_value_(-1.0); }), "clip_value"), "a range");
    optimizer.zero_grad();
    loss_of(model, 1.0, {"b"}, rank, ranks).backward();
    const std::string error = error_of([&] { optimizer.clip_grad_norm_(1.0, 2.0, true); });
    require(contains(error, "parameter 'b'") && contains(error, "got inf"), "a name, got " + error);
    require(filled(zero::full_grad(optimizer, model.a), 1.0), "nothing scaled");
    require(std::isinf(optimizer.clip_grad_norm_(1.0)), "as torch: zeros and NaN");
    require(filled(zero::full_grad(optimizer, model.a), 0.0), "scaled by zero");
  });
}

TEST_CASE("gradients that were made NaN leave nothing behind", "[nonfinite]") {
  at_each_stage([](int64_t stage, int64_t rank, int64_t ranks, const auto& group) {
    Pair model;
    zero::ZeroOptimizer optimizer(model, options_of(stage), zero::SGD{}, group);
    const double nan = std::numeric_limits<double>::quiet_NaN();
    loss_of(model, 1.0, {"b"}, rank, ranks, nan).backward();
    require(std::isnan(optimizer.clip_grad_norm_(1.0)), "a NaN, by which all is scaled");
    optimizer.zero_grad();
    loss_of(model, 1.0, {}, rank, ranks).backward();
    require(optimizer.grad_norm(1.0) == 80.0, "also in the padding");
  });
}
