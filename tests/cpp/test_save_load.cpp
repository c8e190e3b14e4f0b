// zero::save and zero::load: from any number of ranks and stage to any other.

#include "catch.h"
#include "checkpoint_files.h"
#include "save_cases.h"

#include <zero/checkpoint/directory.h>

using namespace zero::test;

namespace {

// Weights and state, whole.
State contents(zero::ZeroOptimizer& optimizer, torch::nn::Module& model) {
  State values;
  for (const at::Tensor& parameter : model.parameters()) {
    values.push_back(zero::full_param(optimizer, parameter));
    for (const auto& [name, value] : zero::full_state(optimizer, parameter)) {
      values.push_back(value);
    }
  }
  return values;
}

} // namespace

TEST_CASE("a checkpoint loads at other ranks and stages", "[checkpoint]") {
  const TemporaryDirectory folder;
  for (int64_t stage = 0; stage <= 3; ++stage) {
    const int64_t ranks = 1 + stage % 3;
    const std::string path = folder / ("step-" + std::to_string(stage));
    State saved;
    run_ranks(ranks, [&](int64_t rank, const auto& group) {
      const auto model = make_gpt();
      zero::ZeroOptimizer optimizer(*model, options_of(stage), zero::AdamW{.lr = 0.01}, group);
      train(optimizer, *model, rank, 0);
      train(optimizer, *model, rank, 1);
      optimizer.set_lr(0.005);
      zero::save(path, *model, &optimizer, {.extra = R"({"step": 2})"});
      const State values = contents(optimizer, *model);
      if (rank == 0) {
        saved = values;
      }
    });
    for (int64_t other = 0; other <= 3; ++other) {
      run_ranks(1 + (stage + other) % 4, [&](int64_t rank, const auto& group) {
        const auto model = make_gpt(/*seed=*/5);
        zero::ZeroOptimizer optimizer(*model, options_of(other), zero::AdamW{}, group);
        const std::string extra = zero::load(path, *model, &optimizer);
        require(extra == R"({"step": 2})", "the extra, got: " + extra);
        require(equal(contents(optimizer, *model), saved), "what was saved");
        require(std::get<zero::AdamW>(optimizer.rule()).lr == 0.005, "the rule's lr");
        train(optimizer, *model, rank, 2);
      });
    }
  }
  REQUIRE(zero::checkpoint::list_checkpoints(folder.path()).size() == 4);
}

TEST_CASE("a run that was stopped goes on bit for bit", "[checkpoint]") {
  const TemporaryDirectory folder;
  for (int64_t stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](int64_t rank, const auto& group) {
      const auto rule = zero::SGD{.lr = 0.1, .momentum = 0.9};
      const auto alone = make_gpt();
      zero::ZeroOptimizer never_stopped(*alone, options_of(stage), rule, group);
      const auto model = make_gpt();
      zero::ZeroOptimizer optimizer(*model, options_of(stage), rule, group);
      for (int64_t step = 0; step < 4; ++step) {
        train(never_stopped, *alone, rank, step);
        if (step < 2) {
          train(optimizer, *model, rank, step);
        }
      }
      const std::string path = folder / ("stage-" + std::to_string(stage));
      zero::save(path, *model, &optimizer);
      const auto fresh = make_gpt(/*seed=*/5);
      zero::ZeroOptimizer resumed(*fresh, options_of(stage), rule, group);
      zero::load(path, *fresh, &resumed);
      train(resumed, *fresh, rank, 2);
      train(resumed, *fresh, rank, 3);
      require(equal(contents(resumed, *fresh), contents(never_stopped, *alone)), "equal bits");
    });
  }
}

TEST_CASE("what does not fit is refused before anything is changed", "[checkpoint]") {
  const TemporaryDirectory folder;
  run_ranks(2, [&](int64_t rank, const auto& group) {
    const auto model = make_gpt();
    zero::ZeroOptimizer optimizer(*model, options_of(2), zero::AdamW{}, group);
    train(optimizer, *model, rank, 0);
    zero::save(folder / "c", *model, &optimizer);
    const auto other = std::make_shared<GPT>(/*layers=*/1, /*dim=*/12, /*heads=*/2, /*context=*/8);
    initialise(*other, 3);
    zero::ZeroOptimizer shallow(*other, options_of(3), zero::AdamW{}, group);
    const std::string names = error_of([&] { zero::load(folder / "c", *other); });
    const auto load_shallow = [&] {
      zero::load(folder / "c", *other, &shallow, {.optimizer_state = false});
    };
    require(contains(error_of(load_shallow), "unexpected"), "names that are too many");
    require(!names.empty(), "a module that is sharded needs its optimizer");
    const auto momentum = make_gpt();
    zero::ZeroOptimizer sgd(*momentum, options_of(1), zero::SGD{.momentum = 0.9}, group);
    const State before = contents(sgd, *momentum);
    const std::string rule = error_of([&] { zero::load(folder / "c", *momentum, &sgd); });
    require(contains(rule, "exp_avg"), "another rule's state, got: " + rule);
    const std::string none = error_of([&] { zero::load(folder / "d", *model, &optimizer); });
    require(contains(none, "no directory"), "no such checkpoint, got: " + none);
    require(equal(contents(sgd, *momentum), before), "unchanged weights");
  });
}

TEST_CASE("a save in the background holds what the model was", "[checkpoint]") {
  const TemporaryDirectory folder;
  for (const std::string transport : {"host", "group"}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      run_ranks(3, [&](int64_t rank, const auto& group) {
        const std::string path = folder / (transport + std::to_string(stage) + "-");
        zero::Options options = options_of(stage);
        options.transport = transport;
        const auto model = make_gpt();
        zero::ZeroOptimizer optimizer(*model, options, zero::AdamW{.lr = 0.01}, group);
        train(optimizer, *model, rank, 0);
        const State before = contents(optimizer, *model);
        zero::async_save(path + "1", *model, &optimizer, {.extra = "1"});
        train(optimizer, *model, rank, 1); // dropping the handle loses nothing
        const State after = contents(optimizer, *model);
        const auto second = zero::async_save(path + "2", *model, &optimizer, {.extra = "2"});
        train(optimizer, *model, rank, 2);
        second->wait();
        require(second->done() && second->directory() == path + "2", "the second has ended");
        require(zero::load(path + "1", *model, &optimizer) == "1", "the first's extra");
        require(equal(contents(optimizer, *model), before), "what the first saved");
        require(zero::load(path + "2", *model, &optimizer) == "2", "the second's extra");
        require(equal(contents(optimizer, *model), after), "what the second saved");
      });
    }
  }
}

TEST_CASE("averages load at other ranks and stages, and go on", "[checkpoint]") {
  const TemporaryDirectory folder;
  const auto averages_of = [](zero::EMA& ema, torch::nn::Module& model) {
    State values;
    for (const at::Tensor& parameter : model.parameters()) {
      values.push_back(ema.average(parameter));
    }
    return values;
  };
  for (int64_t stage = 0; stage <= 3; ++stage) {
    const std::string path = folder / ("stage-" + std::to_string(stage));
    State saved;
    run_ranks(2, [&](int64_t rank, const auto& group) {
      const auto model = make_gpt();
      zero::ZeroOptimizer optimizer(*model, options_of(stage), zero::AdamW{.lr = 0.01}, group);
      zero::EMA ema(optimizer, /*decay=*/0.7);
      for (int64_t step = 0; step < 2; ++step) {
        train(optimizer, *model, rank, step);
        ema.update();
      }
      zero::save(path, *model, &optimizer, {.ema = &ema});
      const State values = averages_of(ema, *model);
      if (rank == 0) {
        saved = values;
      }
      ema.swapped([&] {
        const std::string error =
            error_of([&] { zero::save(path + "-swapped", *model, &optimizer, {.ema = &ema}); });
        require(contains(error, "swap()"), "an error of the swap, got: " + error);
      });
    });
    run_ranks(3, [&](int64_t rank, const auto& group) {
      const auto model = make_gpt(/*seed=*/5);
      zero::ZeroOptimizer optimizer(*model, options_of(3 - stage), zero::AdamW{}, group);
      zero::EMA ema(optimizer);
      zero::load(path, *model, &optimizer, {.ema = &ema});
      require(ema.decay() == 0.7 && ema.updates() == 2, "the settings");
      require(equal(averages_of(ema, *model), saved), "what was saved");
      train(optimizer, *model, rank, 2);
      ema.update();
      State want;
      for (size_t i = 0; i < saved.size(); ++i) {
        const at::Tensor now = zero::full_param(optimizer, model->parameters()[i]);
        want.push_back(saved[i].lerp(now, 1.0 - 0.7));
      }
      require(equal(averages_of(ema, *model), want), "the averages going on");
      zero::save(path + "-without", *model, &optimizer);
      const std::string error =
          error_of([&] { zero::load(path + "-without", *model, &optimizer, {.ema = &ema}); });
      require(contains(error, "without them"), "no averages, got: " + error);
      zero::load(path, *model, &optimizer); // its averages are passed over
    });
  }
}
