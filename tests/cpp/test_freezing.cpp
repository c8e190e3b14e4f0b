// Parameters that are frozen and unfrozen while they train, at stages 0 to 3.

#include "catch.h"
#include "engine_cases.h"

#include <zero/optim/elementwise.h>

using namespace zero::test;

namespace {

struct Terms : torch::nn::Module {
  explicit Terms(bool trainable_b = true) {
    a = register_parameter("a", torch::ones({40}));
    b = register_parameter("b", torch::ones({40}), trainable_b);
    c = register_parameter("c", torch::ones({7}), /*requires_grad=*/false);
  }
  at::Tensor loss(double factor = 1.0) const {
    return (a.sum() + b.sum() + c.sum()) * factor;
  }
  at::Tensor a;
  at::Tensor b;
  at::Tensor c;
};

bool all(const at::Tensor& tensor, double value) {
  return torch::allclose(tensor, torch::full_like(tensor, value), 1e-5, 1e-6);
}

template <typename Case>
void at_each_stage(int64_t ranks, const Case& run, const zero::Options& given = {}) {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage << ", " << ranks << " ranks");
    zero::Options options = given;
    options.stage = stage;
    options.timeout = 20.0;
    run_ranks(ranks, [&](int64_t rank, const auto& group) { run(options, rank, group); });
  }
}

} // namespace

TEST_CASE("a parameter frozen for a step keeps weight, moments and step count", "[freezing]") {
  at_each_stage(2, [](const zero::Options& options, int64_t, const auto& group) {
    const auto model_owner = std::make_shared<Terms>();
    Terms& model = *model_owner;
    zero::ZeroOptimizer optimizer(model, options, zero::SGD{.lr = 0.1, .momentum = 0.9}, group);
    for (int64_t step = 0; step < 4; ++step) {
      model.b.set_requires_grad(step != 1);
      model.loss().backward();
      require(model.b.grad().defined() == (step != 1), "a gradient unless frozen");
      optimizer.step();
      optimizer.zero_grad();
    }
    require(all(zero::full_param(optimizer, model.a), 0.0951), "a = 0.0951");
    require(all(zero::full_param(optimizer, model.b), 0.439), "b = 0.439");
    require(zero::full_state(optimizer, model.b)["step"].item<float>() == 3.0F, "three steps");
  });
}

TEST_CASE("a parameter frozen at wrap trains once it is unfrozen", "[freezing]") {
  for (const int64_t ranks : {1, 2, 3}) {
    at_each_stage(ranks, [=](const zero::Options& options, int64_t rank, const auto& group) {
      const auto model_owner = std::make_shared<Terms>(/*trainable_b=*/false);
      Terms& model = *model_owner;
      zero::ZeroOptimizer optimizer(model, options, zero::SGD{.lr = 0.1, .momentum = 0.9}, group);
      model.loss().backward();
      optimizer.step();
      optimizer.zero_grad();
      require(zero::full_state(optimizer, model.b).empty(), "no state of what is frozen");
      model.b.set_requires_grad(true);
      // Ranks differ: their mean is 1. Two backwards, the first without traffic.
      {
        const auto quiet = optimizer.no_sync();
        model.loss(2.0 * static_cast<double>(rank + 1) / static_cast<double>(ranks + 1)).backward();
      }
      model.loss().backward();
      require(all(zero::full_grad(optimizer, model.b), 2.0), "gradient 2, reduced");
      require(!model.c.grad().defined(), "none of what is still frozen");
      const double norm = optimizer.clip_grad_norm_(1e9);
      require(std::abs(norm - std::sqrt(80 * 4.0)) < 1e-4, "counted by the norm");
      optimizer.step();
      optimizer.zero_grad();
      model.loss().backward();
      optimizer.step();
      require(all(zero::full_param(optimizer, model.b), 1.0 - 0.2 - 0.28), "two steps of b");
      require(all(zero::full_param(optimizer, model.c), 1.0), "c as it was");
      const auto state = zero::full_state(optimizer, model.b);
      require(state.at("step").item<float>() == 2.0F, "two steps counted");
      require(all(state.at("momentum_buffer"), 2.8), "momentum of two steps");
    });
  }
}

TEST_CASE("unfrozen on one rank only counts as zero on the others", "[freezing]") {
  at_each_stage(2, [](const zero::Options& options, int64_t rank, const auto& group) {
    const auto model_owner = std::make_shared<Terms>(/*trainable_b=*/false);
    Terms& model = *model_owner;
    zero::ZeroOptimizer optimizer(model, options, zero::SGD{.lr = 0.1}, group);
    for (int64_t step = 0; step < 2; ++step) {
      model.b.set_requires_grad(rank == 1);
      model.loss().backward();
      require(all(zero::full_grad(optimizer, model.b), 0.5), "half of the gradient on every rank");
      optimizer.step();
      optimizer.zero_grad();
    }
    require(all(zero::full_param(optimizer, model.b), 0.9), "the same weight on every rank");
  });
}

TEST_CASE("nothing but an unfrozen parameter trains", "[freezing]") {
  at_each_stage(2, [](const zero::Options& options, int64_t, const auto& group) {
    const auto model_owner = std::make_shared<Terms>(/*trainable_b=*/false);
    Terms& model = *model_owner;
    zero::ZeroOptimizer optimizer(model, options, zero::AdamW{.lr = 0.1}, group);
    model.a.set_requires_grad(false);
    model.b.set_requires_grad(true);
    for (int64_t step = 0; step < 3; ++step) {
      model.loss().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    require(all(zero::full_param(optimizer, model.a), 1.0), "a as it was");
    require(zero::full_state(optimizer, model.a).empty(), "no state of a");
    require(zero::full_state(optimizer, model.b)["step"].item<float>() == 3.0F, "three steps of b");
  });
}

TEST_CASE("unfrozen parameters in 16 bits have fp32 masters", "[freezing]") {
  zero::Options options;
  options.param_dtype = "bfloat16";
  at_each_stage(
      2,
      [](const zero::Options& given, int64_t, const auto& group) {
        const auto model_owner = std::make_shared<Terms>(/*trainable_b=*/false);
        Terms& model = *model_owner;
        zero::ZeroOptimizer optimizer(model, given, zero::SGD{.lr = 1e-4}, group);
        model.b.set_requires_grad(true);
        for (int64_t step = 0; step < 100; ++step) {
          model.loss().backward();
          optimizer.step();
          optimizer.zero_grad();
        }
        require(all(zero::full_param(optimizer, model.b), 0.99), "a master of 0.99");
        const at::Tensor read = model.b.to(at::kFloat).detach();
        require(torch::equal(read, torch::full({40}, 0.98828125)), "rounded where it is read");
      },
      options);
}

TEST_CASE("torch::optim classes step what is unfrozen", "[freezing]") {
  at_each_stage(2, [](const zero::Options& options, int64_t, const auto& group) {
    const auto model_owner = std::make_shared<Terms>(/*trainable_b=*/false);
    Terms& model = *model_owner;
    const auto reference_owner = std::make_shared<Terms>();
    Terms& reference = *reference_owner;
    const auto rule = zero::elementwise<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.1));
    zero::ZeroOptimizer optimizer(model, options, rule, group);
    torch::optim::RMSprop plain(reference.parameters(), torch::optim::RMSpropOptions(0.1));
    for (int64_t step = 0; step < 4; ++step) {
      model.b.set_requires_grad(step > 0);
      reference.b.set_requires_grad(step > 0);
      model.loss().backward();
      optimizer.step();
      optimizer.zero_grad();
      reference.loss().backward();
      plain.step();
      plain.zero_grad();
    }
    require(
        torch::allclose(zero::full_param(optimizer, model.b), reference.b, 1e-5, 1e-6),
        "plain's b");
  });
}

TEST_CASE("state of a parameter that is frozen is kept when it is loaded", "[freezing]") {
  at_each_stage(2, [](const zero::Options& options, int64_t, const auto& group) {
    const auto model_owner = std::make_shared<Terms>(/*trainable_b=*/false);
    Terms& model = *model_owner;
    zero::ZeroOptimizer optimizer(model, options, zero::SGD{.lr = 0.1, .momentum = 0.5}, group);
    const int64_t index = optimizer.engine().index_of(model.b);
    optimizer.engine().load_full_state(index, {{"momentum_buffer", torch::full({40}, 4.0)}});
    require(all(zero::full_state(optimizer, model.b).at("momentum_buffer"), 4.0), "loaded");
    model.loss().backward();
    optimizer.step();
    optimizer.zero_grad();
    require(all(zero::full_param(optimizer, model.b), 1.0), "frozen still");
    model.b.set_requires_grad(true);
    model.loss().backward();
    optimizer.step();
    require(all(zero::full_param(optimizer, model.b), 0.7), "a step by the loaded moment");
  });
}

TEST_CASE("a gradient by hand of a frozen parameter is refused by name", "[freezing]") {
  at_each_stage(1, [](const zero::Options& options, int64_t, const auto& group) {
    const auto model_owner = std::make_shared<Terms>(/*trainable_b=*/false);
    Terms& model = *model_owner;
    zero::ZeroOptimizer optimizer(model, options, zero::SGD{}, group);
    model.b.mutable_grad() = torch::ones({40});
    require(contains(error_of([&] { optimizer.step(); }), "'b' was frozen"), "a named error");
    optimizer.zero_grad();
    optimizer.step();
  });
}
