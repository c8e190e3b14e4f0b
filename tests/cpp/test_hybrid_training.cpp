// Training over a grid of ranks: the bits of one process that sums in the stated order,
// and of plain sharding and plain replication where the grid is a row or a column.

#include "catch.h"
#include "engine_cases.h"
#include "grids.h"

using namespace zero::test;

namespace {

constexpr int64_t kSteps = 8;

zero::Options options_of(int64_t stage) {
  return {
      .stage = stage,
      .bucket_bytes = 8192,
      .first_bucket_bytes = 2048,
      .min_unit_numel = 0,
      .timeout = 60.0};
}

struct Run {
  State weights;
  std::vector<State> gradients; // by step, before clipping
  std::vector<double> norms;
  zero::Engine::Report report;
};

Run train(int64_t rank, const zero::Options& options, const zero::Ranks& ranks) {
  Run run;
  auto model = make_gpt(/*seed=*/rank + 1); // rank 0's weights must win
  zero::ZeroOptimizer optimizer(*model, options, zero::AdamW{.lr = 1e-2}, ranks);
  for (int64_t step = 0; step < kSteps; ++step) {
    loss_of(*model, tokens_of(step, rank)).backward();
    State gradients;
    for (const at::Tensor& parameter : model->parameters()) {
      gradients.push_back(zero::full_grad(optimizer, parameter));
    }
    run.gradients.push_back(gradients);
    run.norms.push_back(optimizer.clip_grad_norm_(0.5));
    optimizer.step();
    optimizer.zero_grad();
  }
  optimizer.gathered([&] { run.weights = weights_of(*model); });
  run.report = optimizer.engine().report();
  return run;
}

std::vector<Run> train_grid(const zero::Options& options, const Shape& shape) {
  std::vector<Run> runs(shape.size());
  run_grid(shape, [&](int64_t rank, const zero::Groups& groups) {
    runs[rank] = train(rank, options, groups);
  });
  return runs;
}

std::vector<Run> train_plain(const zero::Options& options, int64_t ranks) {
  std::vector<Run> runs(ranks);
  run_ranks(
      ranks, [&](int64_t rank, const Group& group) { runs[rank] = train(rank, options, group); });
  return runs;
}

void require_equal(const Run& run, const Run& other) {
  REQUIRE(equal(run.weights, other.weights));
  REQUIRE(run.norms == other.norms);
  for (int64_t step = 0; step < kSteps; ++step) {
    REQUIRE(equal(run.gradients[step], other.gradients[step]));
  }
}

// Each rank's own gradient, summed over a replica's ranks, then over replicas.
State grid_gradient(GPT& model, int64_t step, const Shape& shape) {
  State total;
  for (int64_t replica = 0; replica < shape.replicas; ++replica) {
    State sum;
    for (int64_t shard = 0; shard < shape.shards; ++shard) {
      model.zero_grad();
      loss_of(model, tokens_of(step, replica * shape.shards + shard)).backward();
      size_t i = 0;
      for (const at::Tensor& parameter : model.parameters()) {
        if (shard == 0) {
          sum.push_back(parameter.grad().clone());
        } else {
          sum[i] = sum[i] + parameter.grad();
        }
        ++i;
      }
    }
    for (size_t i = 0; i < sum.size(); ++i) {
      if (replica == 0) {
        total.push_back(sum[i]);
      } else {
        total[i] = total[i] + sum[i];
      }
    }
  }
  for (at::Tensor& gradient : total) {
    gradient = gradient / static_cast<double>(shape.size());
  }
  return total;
}

// Nothing of it is padding on a grid of 2 x 2.
struct EvenImpl : torch::nn::Module {
  EvenImpl() {
    weight = register_parameter("weight", torch::ones({64, 16}));
    bias = register_parameter("bias", torch::ones({64}));
  }
  at::Tensor forward(const at::Tensor& x) const {
    return torch::linear(x, weight, bias);
  }
  at::Tensor weight;
  at::Tensor bias;
};

} // namespace

TEST_CASE("a grid gives one process's bits at every stage", "[hybrid]") {
  const Shape shape{2, 2};
  const auto first = train_grid(options_of(0), shape);
  auto model = make_gpt();
  REQUIRE(equal(first[0].gradients[0], grid_gradient(*model, 0, shape)));
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    for (const Run& run : stage == 0 ? first : train_grid(options_of(stage), shape)) {
      require_equal(run, first[0]);
    }
  }
}

TEST_CASE("a row is plain sharding and a column plain replication, bit for bit", "[hybrid]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    const auto plain = train_plain(options_of(stage), 3);
    for (const Shape& shape : {Shape{1, 3}, Shape{3, 1}}) {
      const auto runs = train_grid(options_of(stage), shape);
      for (const Run& run : runs) {
        require_equal(run, plain[0]);
      }
      const auto& traffic = runs[0].report.group_traffic;
      REQUIRE((shape.shards == 1 ? traffic.shard : traffic.replicate).bytes() == 0);
      if (shape.shards == 3) {
        REQUIRE(traffic.shard.bytes() == plain[0].report.traffic.bytes());
        REQUIRE(runs[0].report.held.optimizer_state == plain[0].report.held.optimizer_state);
      }
    }
  }
}

TEST_CASE("mixed precision and accumulation over a grid", "[hybrid]") {
  std::vector<State> by_stage;
  for (int64_t stage = 0; stage <= 3; ++stage) {
    std::vector<State> weights(4);
    run_grid({2, 2}, [&](int64_t rank, const zero::Groups& groups) {
      auto model = make_gpt();
      auto options = options_of(stage);
      options.param_dtype = "bfloat16";
      zero::ZeroOptimizer optimizer(*model, options, zero::AdamW{.lr = 1e-2}, groups);
      for (int64_t step = 0; step < 4; ++step) {
        loss_of(*model, tokens_of(step, rank, 0)).backward(); // reduced twice, and added up
        loss_of(*model, tokens_of(step, rank, 1)).backward();
        optimizer.clip_grad_norm_(0.5);
        optimizer.step();
        optimizer.zero_grad();
      }
      for (const at::Tensor& parameter : model->parameters()) {
        weights[rank].push_back(zero::full_param(optimizer, parameter));
      }
    });
    for (const State& own : weights) {
      REQUIRE(equal(own, weights[0]));
    }
    by_stage.push_back(weights[0]);
    REQUIRE(equal(by_stage.back(), by_stage.front()));
  }
}

TEST_CASE("a grid holds and sends what theory says, in each group", "[hybrid]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    std::vector<zero::Engine::Report> reports(4);
    run_grid({2, 2}, [&](int64_t rank, const zero::Groups& groups) {
      auto model = std::make_shared<EvenImpl>();
      auto options = options_of(stage);
      options.reshard_after_forward = "false";
      zero::ZeroOptimizer optimizer(*model, options, zero::AdamW{}, groups);
      for (int64_t step = 0; step < kSteps; ++step) {
        model->forward(at::full({2, 16}, rank, at::kFloat)).sum().backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      optimizer.synchronize();
      reports[rank] = optimizer.engine().report();
    });
    const int64_t psi = 4 * (64 * 16 + 64);
    for (const auto& report : reports) {
      REQUIRE(report.replicas == 2);
      REQUIRE(report.padding == 0);
      // Half of it to the other shard; half a shard to the other replica and back.
      const int64_t each_way = psi / 2 * kSteps;
      const int64_t across = 2 * (psi / 2 / 2) * kSteps;
      const auto& shard = report.group_traffic.shard;
      const auto& replicate = report.group_traffic.replicate;
      REQUIRE(shard.reduce_scatter.bytes == (stage == 0 ? 0 : each_way));
      REQUIRE(shard.all_gather.bytes == (stage == 0 ? 0 : each_way));
      REQUIRE(shard.all_reduce.bytes == (stage == 0 ? 2 * each_way : 0));
      REQUIRE(replicate.all_reduce.bytes == across);
      REQUIRE(replicate.bytes() == across);
      REQUIRE(report.traffic.bytes() == shard.bytes() + replicate.bytes());
      REQUIRE(report.theory_replicate_traffic * kSteps == across);
      REQUIRE(report.theory_traffic * kSteps == report.traffic.bytes());
      REQUIRE(report.held.optimizer_state == 2 * psi / (stage == 0 ? 1 : 2));
      REQUIRE(report.theory_held.optimizer_state == report.held.optimizer_state);
    }
  }
}

TEST_CASE("training over a grid goes on after an error on one rank", "[hybrid]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    std::vector<State> weights(4);
    std::vector<std::string> errors(4);
    const Shape shape{2, 2};
    run_grid(shape, [&](int64_t rank, const zero::Groups& groups) {
      auto model = make_gpt();
      zero::ZeroOptimizer optimizer(*model, options_of(stage), zero::AdamW{.lr = 1e-2}, groups);
      for (int64_t step = 0; step < 4; ++step) {
        const bool fails = step == 2 && rank == 3;
        const at::Tensor first = model->parameters()[0]; // the last to get its gradient
        const auto hook = first.register_hook([fails](const at::Tensor& gradient) {
          TORCH_CHECK(!fails, "a bad batch");
          return gradient;
        });
        const auto error = error_of([&] {
          loss_of(*model, tokens_of(step, rank)).backward();
          optimizer.step();
        });
        first.remove_hook(hook);
        if (step == 2) {
          errors[rank] = error;
        } else {
          TORCH_CHECK(error.empty(), error);
        }
        optimizer.zero_grad();
      }
      optimizer.gathered([&] { weights[rank] = weights_of(*model); });
    });
    INFO("stage " << stage);
    for (int64_t rank = 0; rank < 4; ++rank) {
      INFO(errors[rank]);
      REQUIRE(contains(errors[rank], rank == 3 ? "a bad batch" : "gave up"));
      REQUIRE(equal(weights[rank], weights[0]));
    }
  }
}

TEST_CASE("a model is sharded piece by piece over a grid", "[hybrid]") {
  const Shape shape{2, 2};
  std::vector<std::vector<State>> weights(4);
  run_grid(shape, [&](int64_t rank, const zero::Groups& groups) {
    for (const bool piecewise : {false, true}) {
      auto model = make_gpt(/*seed=*/rank + 1);
      std::unique_ptr<zero::ZeroOptimizer> optimizer;
      if (piecewise) {
        zero::Sharder sharder(options_of(3), groups);
        sharder.shard(*model->blocks, "blocks");
        optimizer = std::make_unique<zero::ZeroOptimizer>(
            *model, std::move(sharder), zero::SGD{.lr = 1e-2});
      } else {
        optimizer = std::make_unique<zero::ZeroOptimizer>(
            *model, options_of(3), zero::SGD{.lr = 1e-2}, groups);
      }
      loss_of(*model, tokens_of(0, rank)).backward();
      optimizer->step();
      optimizer->gathered([&] { weights[rank].push_back(weights_of(*model)); });
    }
  });
  for (const auto& own : weights) {
    REQUIRE(equal(own[0], weights[0][0]));
    REQUIRE(equal(own[1], weights[0][0]));
  }
}

TEST_CASE("options that name groups need the groups", "[hybrid]") {
  auto model = make_gpt();
  const auto error = error_of([&] {
    const zero::Options options{.shard_group = "inner", .replicate_group = "outer"};
    zero::ZeroOptimizer optimizer(*model, options);
  });
  REQUIRE(contains(error, "expected zero::Groups beside shard_group=inner"));
  const auto one = error_of([&] { zero::Options{.shard_group = "inner"}.validate(); });
  REQUIRE(contains(one, "shard_group and replicate_group together, got no replicate_group"));
}
