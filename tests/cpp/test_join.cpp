// Uneven data: ranks whose batches end at different steps (zero::join).

#include "catch.h"
#include "engine_cases.h"

#include <zero/optim/elementwise.h>

using namespace zero::test;

namespace {

struct Plan {
  std::vector<int64_t> batches; // by rank
  int64_t stage = 0;
  std::string over = "active";
  bool accumulates = false; // two batches a step, the first in no_sync
  bool foreign = false; // torch::optim::SGD on shards, instead of the native rule
};

double lr_of(int64_t step) {
  return 0.1 / static_cast<double>(1 + step);
}

zero::Options options_of(const Plan& plan) {
  return {
      .stage = plan.stage,
      .bucket_bytes = 8192,
      .first_bucket_bytes = 2048,
      .min_unit_numel = 0,
      .timeout = 60.0};
}

zero::ZeroOptimizer make_optimizer(GPT& model, const Plan& plan, const Group& group) {
  if (plan.foreign) {
    return {
        model,
        options_of(plan),
        zero::elementwise<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9)),
        group};
  }
  return {model, options_of(plan), zero::SGD{.lr = 0.1, .momentum = 0.9}, group};
}

// What one rank does until its batches end; its own schedule stands still then.
void train(GPT& model, zero::ZeroOptimizer& optimizer, const Plan& plan, int64_t rank) {
  const int64_t micro = plan.accumulates ? 2 : 1;
  for (int64_t batch = 0; batch < plan.batches[rank]; ++batch) {
    if (batch % micro < micro - 1) {
      const auto guard = optimizer.no_sync();
      loss_of(model, tokens_of(batch, rank)).backward();
      continue;
    }
    loss_of(model, tokens_of(batch, rank)).backward();
    optimizer.clip_grad_norm_(0.5);
    optimizer.set_lr(lr_of(batch / micro));
    optimizer.step();
    optimizer.zero_grad();
  }
}

// By rank.
std::vector<State> train_all(const Plan& plan) {
  const auto ranks = static_cast<int64_t>(plan.batches.size());
  std::vector<State> weights(ranks);
  run_ranks(ranks, [&](int64_t rank, const auto& group) {
    auto model = make_gpt(rank + 1);
    zero::ZeroOptimizer optimizer = make_optimizer(*model, plan, group);
    zero::join(
        optimizer, [&] { train(*model, optimizer, plan, rank); }, {.average_over = plan.over});
    optimizer.gathered([&] { weights[rank] = weights_of(*model); });
  });
  return weights;
}

// Each rank's gradient, added up and divided, in one process.
State reference(const Plan& plan) {
  auto model = make_gpt();
  const auto parameters = model->parameters();
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  const int64_t micro = plan.accumulates ? 2 : 1;
  const int64_t longest = *std::max_element(plan.batches.begin(), plan.batches.end());
  for (int64_t begin = 0; begin + micro <= longest; begin += micro) {
    optimizer.zero_grad();
    State sums(parameters.size());
    int64_t active = 0;
    for (size_t rank = 0; rank < plan.batches.size(); ++rank) {
      const int64_t end = std::min(begin + micro, plan.batches[rank]);
      model->zero_grad();
      for (int64_t batch = begin; batch < end; ++batch) {
        loss_of(*model, tokens_of(batch, static_cast<int64_t>(rank))).backward();
      }
      active += begin < end ? 1 : 0;
      for (size_t i = 0; i < sums.size() && begin < end; ++i) {
        const at::Tensor& own = parameters[i].grad();
        sums[i] = sums[i].defined() ? sums[i] + own : own.clone();
      }
    }
    const auto all = static_cast<int64_t>(plan.batches.size());
    for (size_t i = 0; i < sums.size(); ++i) {
      parameters[i].mutable_grad() =
          sums[i] / static_cast<double>(plan.over == "active" ? active : all);
    }
    torch::nn::utils::clip_grad_norm_(parameters, 0.5);
    optimizer.param_groups()[0].options().set_lr(lr_of(begin / micro));
    optimizer.step();
  }
  return weights_of(*model);
}

void check(Plan plan) {
  const State want = reference(plan);
  for (plan.stage = 0; plan.stage <= 3; ++plan.stage) {
    const auto ranks = train_all(plan);
    for (const State& weights : ranks) {
      INFO("stage " << plan.stage << " of " << plan.batches.size() << " ranks over " << plan.over);
      REQUIRE(equal(weights, ranks[0]));
      REQUIRE(close(weights, want, 1e-4, 1e-6));
    }
  }
}

} // namespace

TEST_CASE("weights of a join are those of one process", "[join]") {
  for (const char* over : {"active", "all"}) {
    check({.batches = {1, 3}, .over = over});
    check({.batches = {2, 0, 3}, .over = over});
  }
}

TEST_CASE("what a rank accumulated before its end counts", "[join]") {
  check({.batches = {2, 3, 6}, .accumulates = true});
}

TEST_CASE("an optimizer of torch::optim follows the active ranks' learning rate", "[join]") {
  check({.batches = {1, 3}, .foreign = true});
}

TEST_CASE("ranks train on after a join", "[join]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    const Plan plan{.batches = {1, 3}, .stage = stage};
    const Plan even{.batches = {2, 2}, .stage = stage};
    std::vector<State> weights(2);
    run_ranks(2, [&](int64_t rank, const auto& group) {
      auto model = make_gpt(rank + 1);
      zero::ZeroOptimizer optimizer = make_optimizer(*model, plan, group);
      zero::join(optimizer, [&] { train(*model, optimizer, plan, rank); });
      train(*model, optimizer, even, rank);
      {
        zero::Join scope(optimizer);
        train(*model, optimizer, plan, 1 - rank);
        scope.finish();
      }
      require(!optimizer.engine().joining(), "no open join");
      require(optimizer.engine().report().steps == 8, "3 + 2 + 3 steps on every rank");
      optimizer.gathered([&] { weights[rank] = weights_of(*model); });
    });
    REQUIRE(equal(weights[0], weights[1]));
  }
}

TEST_CASE("several optimizers are joined together", "[join]") {
  const Plan first{.batches = {1, 3}, .stage = 2};
  const Plan second{.batches = {1, 3}, .stage = 3};
  run_ranks(2, [&](int64_t rank, const auto& group) {
    auto a = make_gpt(1);
    auto b = make_gpt(2);
    zero::ZeroOptimizer of_a = make_optimizer(*a, first, group);
    zero::ZeroOptimizer of_b = make_optimizer(*b, second, group);
    zero::join({&of_a, &of_b}, [&] {
      for (int64_t batch = 0; batch < first.batches[rank]; ++batch) {
        (loss_of(*a, tokens_of(batch, rank)) + loss_of(*b, tokens_of(batch, rank))).backward();
        of_a.step();
        of_b.step();
        of_a.zero_grad();
        of_b.zero_grad();
      }
    });
    require(of_a.engine().report().steps == 3, "three steps of the first");
    require(of_b.engine().report().steps == 3, "three steps of the second");
  });
}

TEST_CASE("a join that one rank leaves by an exception ends on all", "[join]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    run_ranks(3, [&](int64_t rank, const auto& group) {
      const Plan plan{.batches = {0, 1, 3}, .stage = stage};
      auto model = make_gpt();
      zero::ZeroOptimizer optimizer = make_optimizer(*model, plan, group);
      const std::string error = error_of([&] {
        zero::join(optimizer, [&] {
          train(*model, optimizer, plan, rank);
          TORCH_CHECK(rank != 2, "boom");
        });
      });
      check_contains(
          error,
          rank == 2 ? std::vector<std::string>{"boom"}
                    : std::vector<std::string>{"rank 2", "zero.join", "boom"});
    });
  }
}

TEST_CASE("wrong use of a join is refused by name", "[join]") {
  run_ranks(2, [&](int64_t rank, const auto& group) {
    const Plan plan{.batches = {1, 1}, .stage = 1};
    auto model = make_gpt();
    zero::ZeroOptimizer optimizer = make_optimizer(*model, plan, group);
    check_contains(
        error_of([&] { zero::Join scope(optimizer, {.average_over = "some"}); }),
        {"average_over", "\"active\" or \"all\"", "some"});
    check_contains(
        error_of(
            [&] { zero::Join scope(optimizer, {.average_over = rank == 0 ? "all" : "active"}); }),
        {"same average_over", "rank"});
    zero::join(optimizer, [&] {
      check_contains(error_of([&] { zero::Join scope(optimizer); }), {"inside another"});
      loss_of(*model, tokens_of(0, rank)).backward();
      zero::LossScaler scaler;
      check_contains(error_of([&] { scaler.unscale_(optimizer); }), {"loss scaler", "zero.join"});
      optimizer.step();
    });
  });
}
