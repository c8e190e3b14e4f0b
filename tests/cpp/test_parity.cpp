// The same numbers at every stage, and those of one process.

#include "catch.h"

#include <algorithm>

#include "engine_cases.h"

using namespace zero::test;

namespace {

constexpr int64_t kSteps = 20;

// Small buckets, so that there are several and parameters straddle shards.
zero::Options options_of(int64_t stage) {
  return {.stage = stage, .bucket_bytes = 8192, .first_bucket_bytes = 2048, .timeout = 60.0};
}

struct Run {
  State weights;
  std::vector<State> gradients; // by step, before clipping
  std::vector<double> norms;
  zero::Engine::Report report;
};

// Trains on every rank at once; the runs by rank.
std::vector<Run> train(int64_t stage, int64_t ranks) {
  std::vector<Run> runs(ranks);
  run_ranks(ranks, [&](int64_t rank, const auto& group) {
    auto model = make_gpt(/*seed=*/rank + 1); // rank 0's weights must win
    zero::ZeroOptimizer optimizer(*model, options_of(stage), zero::AdamW{.lr = 1e-2}, group);
    for (int64_t step = 0; step < kSteps; ++step) {
      loss_of(*model, tokens_of(step, rank)).backward();
      State gradients;
      for (const at::Tensor& parameter : model->parameters()) {
        gradients.push_back(zero::full_grad(optimizer, parameter));
      }
      runs[rank].gradients.push_back(gradients);
      runs[rank].norms.push_back(optimizer.clip_grad_norm_(0.5));
      optimizer.step();
      optimizer.zero_grad();
    }
    runs[rank].weights = weights_of(*model);
    runs[rank].report = optimizer.engine().report();
  });
  return runs;
}

} // namespace

TEST_CASE("stages 0 to 2 give the same bits at each world size", "[parity]") {
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    const auto first = train(0, ranks);
    for (int64_t stage = 0; stage <= 2; ++stage) {
      const auto runs = stage == 0 ? first : train(stage, ranks);
      for (const Run& run : runs) {
        INFO("stage " << stage << " of " << ranks << " ranks");
        REQUIRE(equal(run.weights, first[0].weights));
        REQUIRE(run.norms == first[0].norms);
        for (int64_t step = 0; step < kSteps; ++step) {
          REQUIRE(equal(run.gradients[step], first[0].gradients[step]));
        }
      }
    }
  }
}

TEST_CASE("gradients equal one process that sums in rank order", "[parity]") {
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    const auto runs = train(2, ranks);
    // The reference follows the run's own weights: a native step per gradient.
    auto model = make_gpt();
    torch::optim::AdamW reference(
        model->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(1e-2));
    const State first = mean_gradient(*model, 0, ranks);
    REQUIRE(equal(runs[0].gradients[0], first));
    for (int64_t step = 0; step < kSteps; ++step) {
      State gradients = mean_gradient(*model, step, ranks);
      const auto parameters = model->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        parameters[i].mutable_grad() = gradients[i];
      }
      const double norm = torch::nn::utils::clip_grad_norm_(parameters, 0.5);
      REQUIRE(norm == Approx(runs[0].norms[step]).epsilon(1e-4));
      reference.step();
    }
    // Adam blows up the rounding of gradients that are mathematically zero.
    REQUIRE(close(runs[0].weights, weights_of(*model), 1e-3, 1e-3));
  }
}

TEST_CASE("every step's gradients are one process's, from equal weights", "[parity]") {
  run_ranks(3, [](int64_t rank, const auto& group) {
    auto model = make_gpt();
    zero::ZeroOptimizer optimizer(*model, options_of(1), zero::AdamW{.lr = 1e-2}, group);
    for (int64_t step = 0; step < 5; ++step) {
      optimizer.synchronize();
      auto twin = make_gpt();
      const auto from = model->parameters();
      const auto to = twin->parameters();
      {
        torch::NoGradGuard no_grad;
        for (size_t i = 0; i < from.size(); ++i) {
          to[i].copy_(from[i]);
        }
      }
      loss_of(*model, tokens_of(step, rank)).backward();
      State gradients;
      for (const at::Tensor& parameter : from) {
        gradients.push_back(zero::full_grad(optimizer, parameter));
      }
      require(equal(gradients, mean_gradient(*twin, step, 3)), "one process's gradients");
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

TEST_CASE("traffic is exactly the table's, padding counted", "[parity]") {
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    for (int64_t stage = 0; stage <= 2; ++stage) {
      for (const Run& run : train(stage, ranks)) {
        const zero::Engine::Report& report = run.report;
        const int64_t psi = report.theory_held.parameters + report.padding;
        REQUIRE(report.held.parameters == psi);
        const int64_t each_way = psi / ranks * (ranks - 1) * kSteps;
        const auto& traffic = report.traffic;
        REQUIRE(traffic.reduce_scatter.bytes == (stage == 0 ? 0 : each_way));
        REQUIRE(traffic.all_gather.bytes == (stage == 0 || ranks == 1 ? 0 : each_way));
        REQUIRE(traffic.all_reduce.bytes == (stage == 0 ? 2 * each_way : 0));
        REQUIRE(traffic.broadcast.bytes == 0);
        REQUIRE(report.held.optimizer_state == 2 * psi / (stage == 0 ? 1 : ranks));
        REQUIRE(report.held.gradients == psi / (stage == 2 ? ranks : 1));
        int64_t largest = options_of(stage).bucket_bytes;
        for (const at::Tensor& weight : run.weights) {
          largest = std::max(largest, static_cast<int64_t>(weight.nbytes()) + 64 * ranks);
        }
        REQUIRE(report.held.buffers <= (stage == 2 ? largest : 0)); // one bucket's memory stays
      }
    }
  }
}
