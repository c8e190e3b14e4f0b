// Checkpoints of optimizers that step by a factory's torch::optim optimizer.

#include "catch.h"
#include "checkpoint_files.h"
#include "save_cases.h"

#include <zero/checkpoint/directory.h>
#include <zero/optim/elementwise.h>

using namespace zero::test;

namespace {

namespace optim = torch::optim;

State weights(zero::ZeroOptimizer& optimizer, torch::nn::Module& model) {
  State values;
  for (const at::Tensor& parameter : model.parameters()) {
    values.push_back(zero::full_param(optimizer, parameter));
  }
  return values;
}

struct Case {
  const char* name;
  zero::ShardOptimizerFactory factory; // of the run
  zero::ShardOptimizerFactory fresh; // with other hyper-parameters, which loading replaces
  double lr;
  const char* state; // one of torch.optim's names
};

std::vector<Case> cases() {
  return {
      {"SGD",
       zero::elementwise<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01)),
       zero::elementwise<optim::SGD>(optim::SGDOptions(0.5)),
       0.1,
       "momentum_buffer"},
      {"Adam",
       zero::elementwise<optim::Adam>(optim::AdamOptions(0.01).amsgrad(true).betas({0.8, 0.9})),
       zero::elementwise<optim::Adam>(optim::AdamOptions(0.5)),
       0.01,
       "max_exp_avg_sq"},
      {"AdamW",
       zero::elementwise<optim::AdamW>(optim::AdamWOptions(0.01).weight_decay(0.1)),
       zero::elementwise<optim::AdamW>(optim::AdamWOptions(0.5)),
       0.01,
       "exp_avg"},
      {"RMSprop",
       zero::elementwise<optim::RMSprop>(optim::RMSpropOptions(0.01).momentum(0.5).centered(true)),
       zero::elementwise<optim::RMSprop>(optim::RMSpropOptions(0.5)),
       0.01,
       "grad_avg"},
      {"Adagrad",
       zero::elementwise<optim::Adagrad>(
           optim::AdagradOptions(0.01).lr_decay(0.1).initial_accumulator_value(0.2)),
       zero::elementwise<optim::Adagrad>(optim::AdagradOptions(0.5)),
       0.01,
       "sum"},
  };
}

} // namespace

TEST_CASE("torch::optim optimizers go on bit for bit", "[checkpoint]") {
  const TemporaryDirectory folder;
  for (const Case& one : cases()) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      const std::string path = (folder / std::string(one.name) + std::to_string(stage));
      run_ranks(2, [&](int64_t rank, const auto& group) {
        const auto alone = make_gpt();
        zero::ZeroOptimizer never_stopped(*alone, options_of(stage), one.factory, group);
        const auto model = make_gpt();
        zero::ZeroOptimizer optimizer(*model, options_of(stage), one.factory, group);
        for (int64_t step = 0; step < 4; ++step) {
          train(never_stopped, *alone, rank, step);
          if (step < 2) {
            train(optimizer, *model, rank, step);
          }
        }
        zero::save(path, *model, &optimizer);
        const auto manifest = zero::checkpoint::read_manifest(path);
        require(
            contains(manifest.optimizer, c10::str("\"rule\":\"", one.name, "\"")) &&
                manifest.find(alone->named_parameters()[0].key() + ":" + one.state) != nullptr,
            "Python's names, got " + manifest.optimizer);
        const auto fresh = make_gpt(/*seed=*/5);
        zero::ZeroOptimizer resumed(*fresh, options_of(stage), one.fresh, group);
        train(resumed, *fresh, rank, 7); // what was there before must go
        zero::load(path, *fresh, &resumed);
        require(
            resumed.inner()->param_groups()[0].options().get_lr() == one.lr,
            std::string("the saved lr of ") + one.name);
        train(resumed, *fresh, rank, 2);
        train(resumed, *fresh, rank, 3);
        require(
            equal(weights(resumed, *fresh), weights(never_stopped, *alone)),
            c10::str("equal bits of ", one.name, " at stage ", stage));
      });
    }
  }
}

TEST_CASE("torch::optim state loads at other ranks and stages", "[checkpoint]") {
  const TemporaryDirectory folder;
  for (const Case& one : cases()) {
    const std::string path = (folder / one.name);
    State want;
    run_ranks(2, [&](int64_t rank, const auto& group) {
      const auto model = make_gpt();
      zero::ZeroOptimizer optimizer(*model, options_of(3), one.factory, group);
      train(optimizer, *model, rank, 0);
      train(optimizer, *model, rank, 1);
      zero::save(path, *model, &optimizer);
      train(optimizer, *model, rank, 2);
      const State values = weights(optimizer, *model);
      if (rank == 0) {
        want = values;
      }
    });
    // One rank with both ranks' data, whose gradients are the same but for rounding.
    run_ranks(1, [&](int64_t, const auto& group) {
      const auto model = make_gpt(/*seed=*/5);
      zero::ZeroOptimizer optimizer(*model, options_of(1), one.fresh, group);
      zero::load(path, *model, &optimizer);
      const at::Tensor loss =
          loss_of(*model, tokens_of(2, 0)) / 2 + loss_of(*model, tokens_of(2, 1)) / 2;
      loss.backward();
      optimizer.step();
      require(
          close(weights(optimizer, *model), want, 1e-4, 1e-4),
          std::string("as before: ") + one.name);
    });
    run_ranks(3, [&](int64_t rank, const auto& group) {
      const auto model = make_gpt(/*seed=*/5);
      zero::ZeroOptimizer optimizer(*model, options_of(2), one.fresh, group);
      zero::load(path, *model, &optimizer);
      zero::save(path + "-again", *model, &optimizer);
      const auto other = make_gpt(/*seed=*/6);
      zero::ZeroOptimizer reloaded(*other, options_of(0), one.fresh, group);
      zero::load(path + "-again", *other, &reloaded);
      train(optimizer, *model, rank, 2);
      train(reloaded, *other, rank, 2);
      require(
          close(weights(optimizer, *model), weights(reloaded, *other), 1e-5, 1e-6),
          std::string("the same step: ") + one.name);
    });
  }
}

TEST_CASE("native rules and torch::optim take each other's state", "[checkpoint]") {
  const TemporaryDirectory folder;
  run_ranks(2, [&](int64_t rank, const auto& group) {
    const auto factory = zero::elementwise<optim::AdamW>(optim::AdamWOptions(0.01));
    const auto momentum = zero::elementwise<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9));
    const auto model = make_gpt();
    zero::ZeroOptimizer optimizer(*model, options_of(1), factory, group);
    const auto second = make_gpt();
    zero::ZeroOptimizer sgd(*second, options_of(3), momentum, group);
    for (int64_t step = 0; step < 2; ++step) {
      train(optimizer, *model, rank, step);
      train(sgd, *second, rank, step);
    }
    zero::save((folder / "adamw"), *model, &optimizer);
    zero::save((folder / "sgd"), *second, &sgd);
    const auto native = make_gpt(/*seed=*/5);
    zero::ZeroOptimizer rule(*native, options_of(2), zero::AdamW{.lr = 0.5}, group);
    zero::load((folder / "adamw"), *native, &rule);
    require(std::get<zero::AdamW>(rule.rule()).lr == 0.01, "the saved lr");
    require(zero::full_state(rule, native->parameters()[0]).at("step").item<float>() == 2, "steps");
    const auto native_sgd = make_gpt(/*seed=*/5);
    zero::ZeroOptimizer sgd_rule(*native_sgd, options_of(0), zero::SGD{.lr = 0.5}, group);
    zero::load((folder / "sgd"), *native_sgd, &sgd_rule);
    zero::save((folder / "back"), *native, &rule);
    const auto back = make_gpt(/*seed=*/6);
    zero::ZeroOptimizer again(*back, options_of(3), factory, group);
    zero::load((folder / "back"), *back, &again);
    train(optimizer, *model, rank, 2);
    train(rule, *native, rank, 2);
    train(again, *back, rank, 2);
    train(sgd, *second, rank, 2);
    train(sgd_rule, *native_sgd, rank, 2);
    const State want = weights(optimizer, *model);
    require(close(weights(rule, *native), want, 1e-5, 1e-6), "the native rule's step");
    require(close(weights(again, *back), want, 1e-5, 1e-6), "torch's step after it");
    require(
        close(weights(sgd_rule, *native_sgd), weights(sgd, *second), 1e-5, 1e-6),
        "momentum that goes on");
  });
}

TEST_CASE("groups of a torch::optim optimizer, and parameters that are frozen", "[checkpoint]") {
  const TemporaryDirectory folder;
  const auto grouped = [](double first, double others) -> zero::ShardOptimizerFactory {
    return [=](const std::vector<at::Tensor>& shards) {
      std::vector<optim::OptimizerParamGroup> groups;
      groups.emplace_back(
          std::vector<at::Tensor>{shards[0]}, std::make_unique<optim::AdamOptions>(first));
      groups.emplace_back(
          std::vector<at::Tensor>(shards.begin() + 1, shards.end()),
          std::make_unique<optim::AdamOptions>(others));
      return std::make_unique<optim::Adam>(groups, optim::AdamOptions());
    };
  };
  for (int64_t stage = 0; stage <= 3; ++stage) {
    const std::string path = folder / std::to_string(stage);
    run_ranks(2, [&](int64_t rank, const auto& group) {
      const auto model = make_gpt();
      zero::ZeroOptimizer optimizer(*model, options_of(stage), grouped(0.01, 0.02), group);
      train(optimizer, *model, rank, 0);
      zero::save(path, *model, &optimizer);
      const auto fresh = make_gpt(/*seed=*/5);
      fresh->parameters()[1].set_requires_grad(false);
      zero::ZeroOptimizer resumed(*fresh, options_of(stage), grouped(0.5, 0.5), group);
      zero::load(path, *fresh, &resumed);
      const auto& groups = resumed.inner()->param_groups();
      require(groups[0].options().get_lr() == 0.01, "the first group's lr");
      require(groups[1].options().get_lr() == 0.02, "the other's lr");
      fresh->parameters()[1].set_requires_grad(true);
      train(optimizer, *model, rank, 1);
      train(resumed, *fresh, rank, 1);
      require(
          close(weights(resumed, *fresh), weights(optimizer, *model), 1e-5, 1e-6),
          c10::str("the same step at stage ", stage));
      const auto one = make_gpt();
      zero::ZeroOptimizer other(
          *one, options_of(stage), zero::elementwise<optim::Adam>(optim::AdamOptions()), group);
      const std::string why = error_of([&] { zero::load(path, *one, &other); });
      require(contains(why, "expected 1 groups"), "the number of groups, got: " + why);
    });
  }
}

TEST_CASE("torch::optim state that is unknown or another class's is refused", "[checkpoint]") {
  const TemporaryDirectory folder;
  run_ranks(2, [&](int64_t rank, const auto& group) {
    const auto model = make_gpt();
    zero::ZeroOptimizer adam(
        *model, options_of(2), zero::elementwise<optim::Adam>(optim::AdamOptions(0.01)), group);
    train(adam, *model, rank, 0);
    zero::save((folder / "adam"), *model, &adam);
    const auto other = make_gpt(/*seed=*/5);
    zero::ZeroOptimizer rmsprop(
        *other,
        options_of(2),
        zero::elementwise<optim::RMSprop>(optim::RMSpropOptions(0.01)),
        group);
    const State before = weights(rmsprop, *other);
    const std::string rule = error_of([&] { zero::load((folder / "adam"), *other, &rmsprop); });
    require(
        contains(rule, "RMSprop") && contains(rule, "exp_avg"), "the rule's name, got: " + rule);
    require(equal(weights(rmsprop, *other), before), "unchanged weights");
    zero::load((folder / "adam"), *other, &rmsprop, {.optimizer_state = false});
    const zero::ShardOptimizerFactory lbfgs = [](std::vector<at::Tensor> shards) {
      return std::make_unique<optim::LBFGS>(std::move(shards));
    };
    const auto third = make_gpt();
    zero::ZeroOptimizer refused(*third, options_of(1), lbfgs, group);
    const std::string why = error_of([&] { zero::save((folder / "l"), *third, &refused); });
    require(contains(why, "LBFGS") && contains(why, "whole gradient"), "the reason, got: " + why);
  });
}
