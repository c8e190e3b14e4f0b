// Stepping buckets while backward runs: the same weights as stepping after it, without
// ever holding all gradients.

#include "catch.h"

#include <mutex>

#include <zero/optim/elementwise.h>

#include "engine_cases.h"

using namespace zero::test;

namespace {

zero::Options options_of(int64_t stage, bool in_backward) {
  return {
      .stage = stage,
      .bucket_bytes = 8192,
      .first_bucket_bytes = 2048,
      .min_unit_numel = 0,
      .timeout = 30.0,
      .step_in_backward = in_backward};
}

State full_parameters(zero::ZeroOptimizer& optimizer, torch::nn::Module& model) {
  State whole;
  for (const at::Tensor& parameter : model.parameters()) {
    whole.push_back(zero::full_param(optimizer, parameter));
  }
  return whole;
}

// Some steps of GPT with a rate that changes; the weights of one rank after them.
State train(
    const zero::Options& options,
    int64_t rank,
    const Group& group,
    const zero::Rule& rule) {
  const auto model = make_gpt(1 + rank); // rank 0's values win
  zero::ZeroOptimizer optimizer(*model, options, rule, group);
  for (int64_t step = 0; step < 5; ++step) {
    optimizer.set_lr(1e-2 / static_cast<double>(1 + step));
    loss_of(*model, tokens_of(step, rank)).backward();
    if (options.step_in_backward) {
      for (const at::Tensor& parameter : model->parameters()) {
        require(!parameter.grad().defined(), "no gradient after backward");
      }
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  require(optimizer.engine().report().steps == 5, "five steps");
  const auto state = zero::full_state(optimizer, model->parameters().front());
  require(state.at("step").item<float>() == 5.0F, "five steps counted");
  return full_parameters(optimizer, *model);
}

void compare(zero::Options options, int64_t ranks, const zero::Rule& rule) {
  run_ranks(ranks, [&](int64_t rank, const auto& group) {
    zero::Options after = options;
    after.step_in_backward = false;
    const State expected = train(after, rank, group, rule);
    options.step_in_backward = true;
    zero::Options inside = options;
    require(equal(train(inside, rank, group, rule), expected), "the weights of the same step");
  });
}

struct Branches : torch::nn::Module {
  Branches() {
    for (const char* name : {"a", "b", "c", "d"}) {
      register_parameter(name, torch::ones({40}));
    }
  }
  at::Tensor p(const std::string& name) const {
    return named_parameters()[name];
  }
  // The sum of the branches that are used.
  at::Tensor loss(const std::string& used, double factor = 1.0) const {
    at::Tensor sum = torch::zeros({});
    for (const char name : used) {
      sum = sum + p(std::string(1, name)).sum();
    }
    return sum * factor;
  }
};

bool all(const at::Tensor& tensor, double value) {
  return torch::allclose(tensor, torch::full_like(tensor, value), 1e-6, 1e-6);
}

zero::Options small(int64_t stage) {
  zero::Options options = options_of(stage, true);
  options.bucket_bytes = options.first_bucket_bytes = 64; // one parameter each
  return options;
}

template <typename Case>
void at_each_stage(int64_t ranks, const Case& body) {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    run_ranks(ranks, [&](int64_t rank, const auto& group) { body(stage, rank, group); });
  }
}

} // namespace

TEST_CASE(
    "stepping in backward gives the same bits at each stage and world size",
    "[in_backward]") {
  for (int64_t ranks = 1; ranks <= 3; ++ranks) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      INFO("stage " << stage << " of " << ranks << " ranks");
      compare(options_of(stage, true), ranks, zero::AdamW{});
    }
  }
}

TEST_CASE("stepping in backward gives the same bits over a group", "[in_backward]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    zero::Options options = options_of(stage, true);
    options.transport = "group";
    compare(options, 2, zero::AdamW{.amsgrad = true});
  }
}

TEST_CASE("stepping in backward steps masters", "[in_backward]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    for (const char* reduce : {"bfloat16", "float32"}) {
      INFO("stage " << stage << ", reduced in " << reduce);
      zero::Options options = options_of(stage, true);
      options.param_dtype = "bfloat16";
      options.reduce_dtype = reduce;
      compare(options, 2, zero::Adam{});
    }
  }
}

TEST_CASE("stepping in backward holds the open buckets only", "[in_backward]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    run_ranks(2, [&](int64_t rank, const auto& group) {
      const auto model =
          std::make_shared<GPT>(/*layers=*/8, /*dim=*/24, /*heads=*/2, /*context=*/8);
      initialise(*model, 1);
      zero::ZeroOptimizer optimizer(*model, options_of(stage, true), zero::AdamW{}, group);
      int64_t largest = 8192;
      int64_t bytes = 0;
      for (const at::Tensor& parameter : model->parameters()) {
        largest = std::max<int64_t>(largest, static_cast<int64_t>(parameter.nbytes()));
        bytes += static_cast<int64_t>(parameter.nbytes());
      }
      for (int64_t step = 0; step < 4; ++step) {
        loss_of(*model, tokens_of(step, rank)).backward();
        const auto report = optimizer.engine().report();
        require(report.held.gradients == 0, "no gradient held after backward");
        require(report.theory_held.gradients == 0, "as the theory says");
        if (step >= 2) { // since the second step began: a whole backward
          const int64_t open = stage == 0 ? 3 * (largest + 64 * 64) : 3 * largest / 2 + 64 * 64;
          require(report.peak.gradients > 0, "gradients while backward ran");
          require(report.peak.gradients <= open, "the open buckets at most");
          require(open < bytes / 2, "which are far fewer than all");
        }
        optimizer.step();
        optimizer.zero_grad();
      }
    });
  }
}

TEST_CASE("what no rank used keeps weight, state and step count", "[in_backward]") {
  at_each_stage(2, [](int64_t stage, int64_t, const auto& group) {
    const auto model = std::make_shared<Branches>();
    zero::ZeroOptimizer optimizer(
        *model, small(stage), zero::SGD{.lr = 0.1, .momentum = 0.9}, group);
    for (const char* used : {"abcd", "acd", "abcd", "bd"}) {
      model->loss(used).backward();
      optimizer.step();
    }
    require(all(zero::full_param(optimizer, model->p("d")), 1 - 0.1 - 0.19 - 0.271 - 0.3439), "d");
    require(all(zero::full_param(optimizer, model->p("a")), 1 - 0.1 - 0.19 - 0.271), "a");
    require(all(zero::full_param(optimizer, model->p("b")), 1 - 0.1 - 0.19 - 0.271), "b");
    require(zero::full_state(optimizer, model->p("d"))["step"].template item<float>() == 4.0F, "4");
    require(zero::full_state(optimizer, model->p("b"))["step"].template item<float>() == 3.0F, "3");
  });
}

TEST_CASE("what one rank used is stepped on all with zeros of the others", "[in_backward]") {
  at_each_stage(2, [](int64_t stage, int64_t rank, const auto& group) {
    const auto model = std::make_shared<Branches>();
    zero::ZeroOptimizer optimizer(*model, small(stage), zero::SGD{.lr = 0.1}, group);
    for (int64_t step = 0; step < 4; ++step) {
      // b here, c there; a on both, d on the second of the ranks from the third step on.
      const std::string mine = rank == 0 ? "ab" : step < 2 ? "ac" : "acd";
      model->loss(mine, 2.0).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    require(all(zero::full_param(optimizer, model->p("a")), 1 - 4 * 0.2), "a of both");
    require(all(zero::full_param(optimizer, model->p("b")), 1 - 4 * 0.1), "b of the first");
    require(all(zero::full_param(optimizer, model->p("c")), 1 - 4 * 0.1), "c of the second");
    require(all(zero::full_param(optimizer, model->p("d")), 1 - 2 * 0.1), "d of two steps");
  });
}

TEST_CASE("parameters freeze and unfreeze while backward steps", "[in_backward]") {
  at_each_stage(2, [](int64_t stage, int64_t, const auto& group) {
    const auto model = std::make_shared<Branches>();
    model->p("c").set_requires_grad(false);
    zero::ZeroOptimizer optimizer(
        *model, small(stage), zero::SGD{.lr = 0.1, .momentum = 0.9}, group);
    for (int64_t step = 0; step < 5; ++step) {
      model->p("b").set_requires_grad(step != 1);
      model->p("c").set_requires_grad(step >= 2);
      model->loss("abcd").backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const double three = 1 - 0.1 - 0.19 - 0.271;
    require(all(zero::full_param(optimizer, model->p("c")), three), "three steps of c");
    require(all(zero::full_param(optimizer, model->p("b")), three - 0.3439), "four of b");
    require(all(zero::full_param(optimizer, model->p("a")), three - 0.3439 - 0.40951), "five of a");
  });
}

TEST_CASE("rules are read when backward begins", "[in_backward]") {
  at_each_stage(2, [](int64_t stage, int64_t, const auto& group) {
    const auto model = std::make_shared<Branches>();
    zero::ZeroOptimizer optimizer(*model, small(stage), zero::SGD{.lr = 0.1}, group);
    zero::ZeroOptimizer moved = std::move(optimizer);
    for (const double lr : {0.1, 0.2, 0.3}) {
      moved.set_lr(lr);
      model->loss("abcd").backward();
      moved.set_lr(100.0); // too late
      moved.step();
    }
    require(all(zero::full_param(moved, model->p("a")), 0.4), "1 - 0.1 - 0.2 - 0.3");
  });
}

TEST_CASE("stepping in backward takes a comm hook's gradients", "[in_backward]") {
  at_each_stage(2, [](int64_t stage, int64_t rank, const auto& group) {
    const auto run = [&](bool in_backward) {
      const auto model = make_gpt();
      zero::ZeroOptimizer optimizer(*model, options_of(stage, in_backward), zero::AdamW{}, group);
      optimizer.register_comm_hook(zero::compress_bf16());
      for (int64_t step = 0; step < 3; ++step) {
        loss_of(*model, tokens_of(step, rank)).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      return full_parameters(optimizer, *model);
    };
    require(equal(run(true), run(false)), "the weights of the same step");
  });
}

TEST_CASE("what needs all gradients is refused with the reason", "[in_backward]") {
  const auto model = std::make_shared<Branches>();
  zero::ZeroOptimizer optimizer(*model, small(1), zero::SGD{.lr = 0.1});
  model->loss("abcd").backward();
  const auto refused = [](const std::string& error, const char* name) {
    INFO(error);
    REQUIRE(contains(error, name));
    REQUIRE(contains(error, "step_in_backward"));
  };
  refused(error_of([&] { optimizer.clip_grad_norm_(1.0); }), "clip_grad_norm_");
  refused(error_of([&] { optimizer.clip_grad_value_(1.0); }), "clip_grad_value_");
  refused(error_of([&] { optimizer.grad_norm(); }), "grad_norm");
  refused(error_of([&] { optimizer.grad_norms(); }), "grad_norms");
  refused(error_of([&] { const auto quiet = optimizer.no_sync(); }), "no_sync");
  zero::LossScaler scaler;
  refused(error_of([&] { scaler.step(optimizer); }), "loss scaler");
  refused(error_of([&] { model->loss("abcd").backward(); }), "second backward");
  optimizer.step();
  model->loss("abcd").backward();
  optimizer.step();
  REQUIRE(all(zero::full_param(optimizer, model->p("a")), 0.8));
}

TEST_CASE("rules and options that can't step in backward are refused", "[in_backward]") {
  const auto model = std::make_shared<Branches>();
  zero::Options options = small(1);
  const std::string rule = error_of([&] {
    const auto factory = zero::elementwise<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
    zero::ZeroOptimizer optimizer(*model, options, factory);
  });
  REQUIRE(contains(rule, "expected a native rule"));
  options.on_nonfinite = "skip";
  REQUIRE(contains(error_of([&] { options.validate(); }), "on_nonfinite"));
}

TEST_CASE("a backward that fails after it stepped asks for a checkpoint", "[in_backward]") {
  at_each_stage(2, [](int64_t stage, int64_t rank, const auto& group) {
    const auto model = std::make_shared<Branches>();
    zero::ZeroOptimizer optimizer(*model, small(stage), zero::SGD{.lr = 0.1}, group);
    bool fails = false;
    model->p("a").register_hook([&](const at::Tensor& gradient) {
      TORCH_CHECK(!fails, "a bug in backward");
      return gradient;
    });
    for (int64_t step = 0; step < 2; ++step) {
      model->loss("abcd").backward();
      optimizer.step();
    }
    fails = rank == 1;
    // d, c and b come before a: when b is on its way, d is stepped.
    const std::string error = error_of([&] { model->loss("abcd").backward(); });
    check_contains(error, {rank == 1 ? "a bug in backward" : "rank 1"});
    fails = false;
    const std::string what = "load the weights and the optimizer state of a checkpoint";
    optimizer.zero_grad();
    check_contains(error_of([&] { model->loss("abcd").backward(); }), {what});
    check_contains(error_of([&] { optimizer.step(); }), {what});
    // As a checkpoint of the first step would.
    zero::Engine& engine = optimizer.engine();
    for (int64_t i = 0; i < engine.parameter_count(); ++i) {
      engine.load_full_state(i, {});
    }
    optimizer.gathered(
        [&] {
          const torch::NoGradGuard no_grad;
          for (const char* name : {"a", "b", "c", "d"}) {
            model->p(name).fill_(0.9);
          }
        },
        /*writeback=*/true);
    for (int64_t step = 0; step < 2; ++step) {
      model->loss("abcd").backward();
      optimizer.step();
    }
    require(all(zero::full_param(optimizer, model->p("a")), 0.7), "two steps from there");
    require(all(zero::full_param(optimizer, model->p("d")), 0.7), "of all parameters");
  });
}
