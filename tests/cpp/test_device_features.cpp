// What training can do beside plain steps, on a fake device: each case gives the CPU's
// bits, at stages 0 to 3, and leaves nothing unordered.

#include "catch.h"
#include "checkpoint_files.h"
#include "device_cases.h"

#include <algorithm>
#include <limits>

#include <zero/optim/ema.h>
#include <zero/optim/loss_scaler.h>

#include "grids.h"

using namespace zero::test;

namespace {

struct Rank {
  int64_t rank;
  int64_t ranks;
  c10::Device device;
  zero::Options options;
  zero::Ranks group;

  std::shared_ptr<DeviceModel> model() const {
    return std::make_shared<DeviceModel>(rank + 1, device);
  }
  at::Tensor tokens(int64_t step, int64_t micro = 0) const {
    return tokens_of(step, rank, micro).to(device);
  }
};

using Case = std::function<State(const Rank&)>;

State whole(zero::ZeroOptimizer& optimizer, torch::nn::Module& model) {
  State values;
  for (const at::Tensor& parameter : model.parameters()) {
    values.push_back(zero::full_param(optimizer, parameter).cpu());
    for (const auto& [name, value] : zero::full_state(optimizer, parameter)) {
      values.push_back(value.cpu());
    }
  }
  return values;
}

void step(zero::ZeroOptimizer& optimizer, DeviceModel& model, const at::Tensor& tokens) {
  loss_of(model, tokens).backward();
  optimizer.step();
  optimizer.zero_grad();
}

std::vector<State> run(const Case& body, zero::Options options, int64_t ranks, bool on_device) {
  std::vector<State> states(ranks);
  options.transport = on_device ? "auto" : "host";
  run_ranks(ranks, [&](int64_t rank, const Group& group) {
    const auto device =
        on_device ? zero::fake::device(static_cast<int8_t>(rank)) : c10::Device("cpu");
    states[rank] = body({rank, ranks, device, options, group});
  });
  zero::fake::check();
  return states;
}

// At each stage the CPU's bits.
void compare(const Case& body, zero::Options options = {}, int64_t ranks = 2) {
  use_fake_devices();
  const Deterministic in_rank_order;
  options.bucket_bytes = 8192;
  options.first_bucket_bytes = 2048;
  options.min_unit_numel = 0;
  options.timeout = 60.0;
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    options.stage = stage;
    const auto expected = run(body, options, ranks, /*on_device=*/false);
    const auto states = run(body, options, ranks, /*on_device=*/true);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      REQUIRE(!expected[rank].empty());
      REQUIRE(equal(states[rank], expected[rank]));
    }
  }
}

} // namespace

TEST_CASE("gradients are accumulated on a device as on the CPU", "[device]") {
  for (const bool half : {false, true}) {
    zero::Options options;
    if (half) {
      options.param_dtype = "bfloat16";
    }
    compare(
        [](const Rank& on) {
          const auto model = on.model();
          zero::ZeroOptimizer optimizer(*model, on.options, zero::AdamW{.lr = 1e-2}, on.group);
          for (int64_t s = 0; s < 3; ++s) {
            {
              const auto no_sync = optimizer.no_sync();
              loss_of(*model, on.tokens(s, 0)).backward();
            }
            loss_of(*model, on.tokens(s, 1)).backward();
            loss_of(*model, on.tokens(s, 2)).backward();
            optimizer.clip_grad_value_(0.01);
            optimizer.step();
            optimizer.zero_grad();
          }
          return whole(optimizer, *model);
        },
        options);
  }
}

TEST_CASE("buckets are stepped in backward on a device", "[device]") {
  zero::Options options;
  options.step_in_backward = true;
  compare(
      [](const Rank& on) {
        const auto model = on.model();
        zero::ZeroOptimizer optimizer(*model, on.options, zero::AdamW{.lr = 1e-2}, on.group);
        for (int64_t s = 0; s < 4; ++s) {
          step(optimizer, *model, on.tokens(s));
        }
        return whole(optimizer, *model);
      },
      options);
}

TEST_CASE("averages of weights on a device", "[device]") {
  compare([](const Rank& on) {
    const auto model = on.model();
    zero::ZeroOptimizer optimizer(*model, on.options, zero::AdamW{.lr = 1e-2}, on.group);
    zero::EMA ema(optimizer, 0.75);
    for (int64_t s = 0; s < 3; ++s) {
      step(optimizer, *model, on.tokens(s));
      ema.update();
    }
    State states = whole(optimizer, *model);
    ema.swapped([&] {
      for (const at::Tensor& parameter : model->parameters()) {
        states.push_back(zero::full_param(optimizer, parameter).cpu());
      }
    });
    return states;
  });
}

TEST_CASE("a step that meets an infinity is left out on the device", "[device]") {
  zero::Options options;
  options.on_nonfinite = "skip";
  compare(
      [](const Rank& on) {
        const auto model = on.model();
        zero::ZeroOptimizer optimizer(*model, on.options, zero::AdamW{.lr = 1e-2}, on.group);
        for (int64_t s = 0; s < 4; ++s) {
          // Of one rank only, in the second step.
          const double factor =
              s == 1 && on.rank == 1 ? std::numeric_limits<double>::infinity() : 1.0;
          (loss_of(*model, on.tokens(s)) * factor).backward();
          optimizer.step();
          optimizer.zero_grad();
        }
        const auto report = optimizer.engine().report();
        require(report.nonfinite_steps == 1, "one step left out");
        const auto state = zero::full_state(optimizer, model->tokens);
        require(state.at("step").item<float>() == 3.0F, "three steps counted");
        return whole(optimizer, *model);
      },
      options);
}

TEST_CASE("parameters that step at different times keep their own counts", "[device]") {
  compare([](const Rank& on) {
    const auto model = on.model();
    zero::ZeroOptimizer optimizer(*model, on.options, zero::AdamW{.lr = 1e-2}, on.group);
    for (int64_t s = 0; s < 5; ++s) {
      at::Tensor loss = loss_of(*model, on.tokens(s));
      if (s % 2 == 1) {
        loss = loss + model->unused.square().sum();
      }
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto late = zero::full_state(optimizer, model->unused);
    require(late.at("step").item<float>() == 2.0F, "two steps of one parameter");
    return whole(optimizer, *model);
  });
}

TEST_CASE("the loss scale on a device", "[device]") {
  zero::Options options;
  options.param_dtype = "float16";
  compare(
      [](const Rank& on) {
        const auto model = on.model();
        zero::ZeroOptimizer optimizer(*model, on.options, zero::AdamW{.lr = 1e-3}, on.group);
        zero::LossScaler scaler({.init_scale = 65536.0 * 1024, .growth_interval = 2});
        for (int64_t s = 0; s < 16; ++s) {
          scaler.scale(loss_of(*model, on.tokens(s))).backward();
          if (s % 2 == 0) {
            scaler.unscale_and_clip_(optimizer, 0.5);
          }
          scaler.step(optimizer);
          scaler.update();
          optimizer.zero_grad();
        }
        State states = whole(optimizer, *model);
        states.push_back(torch::tensor(scaler.get_scale()));
        require(optimizer.engine().report().nonfinite_steps > 0, "some steps left out");
        return states;
      },
      options);
}

TEST_CASE("what a device trained the CPU loads, and back", "[device]") {
  const TemporaryDirectory folder;
  compare([&](const Rank& on) {
    const auto model = on.model();
    zero::ZeroOptimizer optimizer(*model, on.options, zero::AdamW{.lr = 1e-2}, on.group);
    step(optimizer, *model, on.tokens(0));
    step(optimizer, *model, on.tokens(1));
    const std::string path =
        folder / ((on.device.is_cpu() ? "cpu" : "device") + std::to_string(on.options.stage));
    zero::save(path, *model, &optimizer);
    step(optimizer, *model, on.tokens(2));
    // What the CPU saved, at the stage before where there is one.
    const auto other =
        folder / ("cpu" + std::to_string(std::max<int64_t>(0, on.options.stage - 1)));
    zero::load(other, *model, &optimizer);
    step(optimizer, *model, on.tokens(3));
    return whole(optimizer, *model);
  });
}

TEST_CASE("a grid of devices shards and replicates", "[device]") {
  use_fake_devices();
  const auto train = [](int64_t rank, const zero::Groups& groups, int64_t stage, bool on_device) {
    const auto device =
        on_device ? zero::fake::device(static_cast<int8_t>(rank)) : c10::Device("cpu");
    zero::Options options{.stage = stage, .bucket_bytes = 8192, .timeout = 60.0};
    options.transport = on_device ? "auto" : "host";
    const Rank on{rank, 4, device, options, groups};
    const auto model = on.model();
    zero::ZeroOptimizer optimizer(*model, options, zero::SGD{.lr = 0.1}, on.group);
    for (int64_t s = 0; s < 3; ++s) {
      loss_of(*model, on.tokens(s)).backward();
      optimizer.clip_grad_norm_(0.5);
      optimizer.step();
      optimizer.zero_grad();
    }
    State states = whole(optimizer, *model);
    const auto traffic = optimizer.engine().report().group_traffic;
    states.push_back(torch::tensor({traffic.shard.bytes(), traffic.replicate.bytes()}));
    return states;
  };
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    std::vector<State> expected(4);
    std::vector<State> states(4);
    run_grid({2, 2}, [&](int64_t rank, const zero::Groups& groups) {
      expected[rank] = train(rank, groups, stage, false);
    });
    run_grid({2, 2}, [&](int64_t rank, const zero::Groups& groups) {
      states[rank] = train(rank, groups, stage, true);
    });
    zero::fake::check();
    for (int64_t rank = 0; rank < 4; ++rank) {
      REQUIRE(torch::equal(states[rank].back(), expected[rank].back()));
      REQUIRE(close(states[rank], expected[rank], 1e-5, 1e-6));
      REQUIRE(equal(states[rank], states[0]));
    }
  }
}

TEST_CASE("parameters on two devices are refused by name", "[device]") {
  use_fake_devices();
  struct Split : torch::nn::Module {
    Split() {
      register_parameter("here", at::zeros({3}));
      register_parameter("there", at::zeros({3}, at::TensorOptions().device(zero::fake::device())));
    }
  } model;
  const std::string error = error_of([&] { zero::ZeroOptimizer optimizer(model, {.stage = 1}); });
  check_contains(error, {"'there'", "'here'", "one device"});
}
