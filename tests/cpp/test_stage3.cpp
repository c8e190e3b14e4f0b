// Stage 3 through the on-use guard alone: an unmodified torch::nn::Module whose
// parameters are gathered unit by unit.

#include "catch.h"
#include "engine_cases.h"

#include <zero/sharding/unit_schedule.h>

using namespace zero::test;

namespace {

constexpr int64_t kSteps = 20;

struct Run {
  State weights;
  std::vector<double> losses;
  std::vector<double> norms;
  int64_t gathered_first = 0; // bytes sent in all-gathers in the third step
  int64_t gathered_last = 0; // and in the last
  zero::Engine::Report report;
};

std::vector<Run> train(const zero::Options& options, int64_t ranks) {
  std::vector<Run> runs(ranks);
  run_ranks(ranks, [&](int64_t rank, const auto& group) {
    Run& run = runs[rank];
    auto model = make_gpt(/*seed=*/rank + 1);
    zero::ZeroOptimizer optimizer(*model, options, zero::AdamW{.lr = 1e-2}, group);
    int64_t before = 0;
    for (int64_t step = 0; step < kSteps; ++step) {
      const at::Tensor loss = loss_of(*model, tokens_of(step, rank));
      loss.backward();
      run.losses.push_back(loss.item<double>());
      run.norms.push_back(optimizer.clip_grad_norm_(0.5));
      optimizer.step();
      optimizer.zero_grad();
      const int64_t sent = optimizer.engine().report().traffic.all_gather.bytes;
      (step == 2 ? run.gathered_first : run.gathered_last) = sent - before;
      before = sent;
    }
    run.report = optimizer.engine().report();
    optimizer.gathered([&] { run.weights = weights_of(*model); });
  });
  return runs;
}

zero::Options stage3(const std::string& reshard = "true", int64_t prefetch = 1) {
  return {
      .stage = 3,
      .prefetch = prefetch,
      .reshard_after_forward = reshard,
      .min_unit_numel = 0,
      .timeout = 60.0};
}

std::vector<std::string> errors_of_reads(const at::Tensor& weight) {
  return {error_of([&] { weight.data_ptr(); }), error_of([&] { weight.detach().zero_(); })};
}

} // namespace

TEST_CASE("stage 3 gives the bits of stage 0", "[stage3]") {
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    const auto first = train({.stage = 0, .timeout = 60.0}, ranks);
    const std::vector<zero::Options> all = ranks == 2
        ? std::
              vector{stage3(), stage3("true", 0), stage3("true", 3), stage3("false"), stage3("auto")}
        : std::vector{stage3(), stage3("false", 3)};
    for (const zero::Options& options : all) {
      const auto runs = train(options, ranks);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        INFO(
            ranks << " ranks, reshard " << options.reshard_after_forward << ", prefetch "
                  << options.prefetch);
        REQUIRE(equal(runs[rank].weights, first[0].weights));
        REQUIRE(runs[rank].losses == first[rank].losses);
        REQUIRE(runs[rank].norms == first[0].norms);
      }
    }
  }
}

TEST_CASE("stage 3 holds and sends what the table says", "[stage3]") {
  for (const char* reshard : {"true", "false"}) {
    for (const Run& run : train(stage3(reshard), 3)) {
      const zero::Engine::Report& report = run.report;
      const int64_t padded = report.held.parameters * 3;
      const int64_t psi = report.theory_held.optimizer_state * 3 / 2;
      REQUIRE(report.held.parameters == report.theory_held.parameters + report.padding / 3);
      REQUIRE(padded >= psi);
      REQUIRE(report.held.gradients == padded / 3);
      REQUIRE(report.held.optimizer_state == 2 * padded / 3);
      REQUIRE(report.traffic.reduce_scatter.bytes == padded / 3 * 2 * kSteps);
      REQUIRE(run.gathered_first == run.gathered_last);
      const int64_t once = padded / 3 * 2;
      if (std::string(reshard) == "false") {
        REQUIRE(run.gathered_last == once);
      } else {
        // What the end of forward leaves whole is where backward begins.
        REQUIRE(run.gathered_last > once);
        REQUIRE(run.gathered_last <= 2 * once);
      }
    }
  }
}

TEST_CASE("a sharded weight of a C++ module answers for itself", "[stage3]") {
  run_ranks(2, [](int64_t rank, const auto& group) {
    auto model = make_gpt(rank + 1);
    const State want = weights_of(*make_gpt(1));
    std::vector<std::string> gone;
    const at::Tensor weight = model->parameters()[5];
    {
      zero::ZeroOptimizer optimizer(*model, stage3(), zero::AdamW{}, group);
      require(weight.sizes() == want[5].sizes(), "the whole shape");
      for (const std::string& error : errors_of_reads(weight)) {
        check_contains(error, {"is sharded", "rank"});
      }
      require(torch::equal(zero::full_param(optimizer, weight), want[5]), "rank 0's values");
      {
        torch::NoGradGuard no_grad; // an operation gathers what it reads
        require(torch::equal(weight.detach() + 0, want[5]), "values gathered on use");
      }
      optimizer.gathered([&] {
        const at::Tensor inside = weight.detach();
        require(torch::equal(inside, want[5]), "values inside gathered()");
        check_contains(error_of([&] { inside.zero_(); }), {"is sharded", "writeback"});
      });
      optimizer.gathered([&] { weight.detach().fill_(rank + 3.0); }, /*writeback=*/true);
      require(
          torch::equal(zero::full_param(optimizer, weight), torch::full_like(want[5], 3.0)),
          "rank 0's edit on all ranks");
      loss_of(*model, tokens_of(0, rank)).backward();
      optimizer.step();
    }
    check_contains(error_of([&] { weight.sum(); }), {"is gone", "release()"});
  });
}

TEST_CASE("release gives a plain module back", "[stage3]") {
  run_ranks(2, [](int64_t rank, const auto& group) {
    auto model = make_gpt(rank + 1);
    State want;
    {
      zero::ZeroOptimizer optimizer(*model, stage3(), zero::AdamW{}, group);
      loss_of(*model, tokens_of(0, rank)).backward();
      optimizer.step();
      optimizer.zero_grad();
      optimizer.gathered([&] { want = weights_of(*model); });
      optimizer.release();
      check_contains(error_of([&] { optimizer.step(); }), {"release()"});
    }
    require(equal(weights_of(*model), want), "the weights of the last step");
    model->parameters()[0].detach().zero_();
    loss_of(*model, tokens_of(1, rank)).backward();
    require(model->parameters()[0].grad().defined(), "a plain gradient");
  });
}

TEST_CASE("a model sharded module by module trains like a whole one", "[stage3]") {
  run_ranks(2, [](int64_t rank, const auto& group) {
    const auto step_of = [&](GPT& model, zero::ZeroOptimizer& optimizer, int64_t step) {
      loss_of(model, tokens_of(step, rank)).backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    auto whole = make_gpt(1);
    zero::ZeroOptimizer reference(*whole, {.stage = 0}, zero::AdamW{.lr = 1e-2}, group);
    auto model = make_gpt(rank + 1);
    zero::Sharder sharder(stage3(), group);
    for (size_t i = 0; i < model->blocks->size(); ++i) {
      sharder.shard(model->blocks->ptr(i), "blocks." + std::to_string(i));
      check_contains(
          error_of([&] { model->blocks[i]->parameters()[0].data_ptr(); }),
          {"blocks." + std::to_string(i) + ".", "is sharded"});
    }
    zero::ZeroOptimizer optimizer(*model, std::move(sharder), zero::AdamW{.lr = 1e-2});
    require(
        optimizer.engine().unit_names() == std::vector<std::string>{"", "blocks.0", "blocks.1"},
        "a unit for each block and the root");
    for (int64_t step = 0; step < 3; ++step) {
      step_of(*whole, reference, step);
      step_of(*model, optimizer, step);
    }
    optimizer.gathered(
        [&] { require(equal(weights_of(*model), weights_of(*whole)), "equal bits"); });
  });
  check_contains(
      error_of([] { zero::Sharder({.stage = 2}); }), {"expected stage 3", "got stage 2"});
}

TEST_CASE("evaluation without grad mode before and between training", "[stage3]") {
  run_ranks(2, [](int64_t rank, const auto& group) {
    auto model = make_gpt(1);
    auto plain = make_gpt(1);
    zero::ZeroOptimizer optimizer(*model, stage3(), zero::SGD{.lr = 0.1}, group);
    torch::optim::SGD reference(plain->parameters(), torch::optim::SGDOptions(0.1));
    for (int64_t step = 0; step < 3; ++step) {
      {
        const torch::NoGradGuard no_grad;
        const c10::InferenceMode inference(step == 1);
        require(
            torch::allclose(
                model->forward(tokens_of(9, 0).slice(1, 0, -1)),
                plain->forward(tokens_of(9, 0).slice(1, 0, -1)),
                1e-4,
                1e-5),
            "the plain model's output");
      }
      loss_of(*model, tokens_of(step, 0)).backward(); // equal data: the mean is the gradient
      optimizer.step();
      optimizer.zero_grad();
      loss_of(*plain, tokens_of(step, 0)).backward();
      reference.step();
      reference.zero_grad();
    }
    static_cast<void>(rank);
  });
}

TEST_CASE("the schedule learns an order and follows a change", "[stage3]") {
  using Units = std::vector<int64_t>;
  zero::sharding::UnitSchedule schedule;
  const auto forward = [&](const Units& units) {
    for (const int64_t unit : units) {
      schedule.use(unit, false, false);
    }
  };
  const auto ahead = [&](int64_t count) {
    const auto units = schedule.ahead(count);
    return Units(units.begin(), units.end());
  };
  forward({0, 1, 2, 3});
  REQUIRE(ahead(2).empty());
  REQUIRE(schedule.forward_order() == Units{0, 1, 2, 3});
  // The first backward is guessed.
  schedule.use(3, true, false);
  REQUIRE(ahead(2) == Units{2, 1});
  schedule.use(2, true, false);
  schedule.use(1, true, false);
  schedule.end_pass();
  schedule.restart();
  forward({0, 1});
  REQUIRE(ahead(1) == Units{2});
  REQUIRE(ahead(3) == Units{2, 3});
  // Another branch: learned at once.
  forward({3, 2});
  schedule.restart();
  forward({0, 1});
  REQUIRE(ahead(2) == Units{3, 2});
  // A unit between others is told by what came before it.
  schedule.restart();
  forward({5, 0, 6, 0, 7, 0});
  schedule.restart();
  forward({5, 0});
  REQUIRE(ahead(1) == Units{6});
  forward({6, 0});
  REQUIRE(ahead(1) == Units{7});
}
