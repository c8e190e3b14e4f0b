// What steps, reads, saves and loads offloaded training: torch's optimizers, loss scales,
// averages and checkpoints.

#include "catch.h"
#include "checkpoint_files.h"
#include "offload_cases.h"

#include <filesystem>
#include <map>

#include <zero/optim/elementwise.h>

using namespace zero::test;
namespace fake = zero::fake;

namespace {

namespace fs = std::filesystem;

// Of a directory's data files, by their names without the save's own number.
std::map<std::string, std::string> data_of(const std::string& directory) {
  std::map<std::string, std::string> contents;
  for (const auto& file : fs::directory_iterator(directory)) {
    if (file.path().extension() == ".safetensors") {
      std::string name = file.path().filename();
      const size_t number = name.find('-');
      name.erase(number, name.find('-', number + 1) - number);
      contents[name] = read_file(file.path());
    }
  }
  return contents;
}

void train(zero::ZeroOptimizer& optimizer, DeviceModel& model, int64_t rank, int64_t step) {
  loss_of(model, tokens_of(step, rank).to(model.tokens.device())).backward();
  optimizer.step();
  optimizer.zero_grad();
}

// Without, on the CPU, and with each kind that the stage has.
std::vector<std::string> with_and_without(int64_t stage) {
  std::vector<std::string> offloads = offloads_of(stage);
  offloads.insert(offloads.begin(), "");
  return offloads;
}

// Runs `body(rank, group, options, on_device)`, which gives a rank's results, with and
// without offload: all ranks and all runs must give the same.
template <typename Body>
void require_equal_runs(int64_t stage, const zero::Options& given, const Body& body) {
  std::vector<State> results;
  for (const std::string& offload : with_and_without(stage)) {
    const bool on_device = !offload.empty();
    zero::Options options = offload_options(stage, on_device, offload);
    options.param_dtype = given.param_dtype;
    run_ranks(2, [&](int64_t rank, const auto& group) {
      const State result = body(rank, group, options, on_device);
      if (rank == 0) {
        results.push_back(result);
      }
    });
    fake::check();
  }
  for (const State& result : results) {
    REQUIRE(!result.empty());
    REQUIRE(equal(result, results.front()));
  }
}

// Steps by hand: the caller is the rule.
void step_by_hand(zero::Engine& engine, bool on_device) {
  require(engine.begin_step(), "a step");
  const at::NoGradGuard no_grad;
  for (const int64_t index : engine.stepping()) {
    const at::Tensor gradient = engine.stepping_gradient(index);
    at::Tensor shard = engine.shard_parameter(index);
    require(shard.is_cpu() && gradient.is_cpu(), "what is stepped on the CPU");
    if (on_device) { // nothing that a copy still reads or writes
      fake::host_reads(gradient);
      fake::host_writes(shard);
    }
    shard.sub_(gradient, 0.1);
  }
  engine.end_step();
}

} // namespace

TEST_CASE("torch's optimizers step the host's copies, when these are there", "[offload]") {
  use_fake_devices();
  const Deterministic in_rank_order;
  const auto factory = zero::elementwise<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    require_equal_runs(stage, {}, [&](int64_t rank, const auto& group, auto& options, bool device) {
      DeviceModel model(1, device_of(rank, device));
      zero::ZeroOptimizer optimizer(model, options, factory, group);
      for (int64_t step = 0; step < 5; ++step) {
        loss_of(model, tokens_of(step, rank).to(model.tokens.device())).backward();
        if (step % 2 == 1) {
          step_by_hand(optimizer.engine(), device);
        } else {
          optimizer.step();
        }
        optimizer.zero_grad();
      }
      return contents_of(optimizer, model);
    });
  }
}

TEST_CASE("loss scales work with offload", "[offload]") {
  use_fake_devices();
  const Deterministic in_rank_order;
  zero::Options given;
  given.param_dtype = "float16";
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    require_equal_runs(
        stage, given, [&](int64_t rank, const auto& group, auto& options, bool device) {
          DeviceModel model(1, device_of(rank, device));
          zero::ZeroOptimizer optimizer(model, options, zero::AdamW{.lr = 1e-2}, group);
          zero::LossScaler scaler({.init_scale = 65536.0 * 1024.0, .growth_interval = 2});
          int64_t left_out = 0;
          for (int64_t step = 0; step < 16; ++step) {
            scaler.scale(loss_of(model, tokens_of(step, rank).to(model.tokens.device())))
                .backward();
            if (step % 2 == 0) {
              scaler.unscale_and_clip_(optimizer, 0.5);
            }
            left_out += scaler.step(optimizer) ? 0 : 1;
            scaler.update();
            optimizer.zero_grad();
          }
          require(left_out > 0 && left_out < 16, "some steps left out and some taken");
          State result = contents_of(optimizer, model);
          result.push_back(at::scalar_tensor(scaler.get_scale()));
          result.push_back(at::scalar_tensor(left_out));
          return result;
        });
  }
}

TEST_CASE("what a scaler found on the device leaves the step out", "[offload]") {
  use_fake_devices();
  for (int64_t stage = 0; stage <= 3; ++stage) {
    for (const std::string& offload : offloads_of(stage)) {
      INFO("offload=" << offload << " at stage " << stage);
      run_ranks(2, [&](int64_t rank, const auto& group) {
        const c10::Device device = device_of(rank, true);
        DeviceModel model(1, device);
        zero::ZeroOptimizer optimizer(
            model, offload_options(stage, true, offload), zero::AdamW{}, group);
        train(optimizer, model, rank, 0);
        const State before = contents_of(optimizer, model);
        zero::Engine& engine = optimizer.engine();
        loss_of(model, tokens_of(1, rank).to(device)).backward();
        const at::Tensor found =
            at::full({1}, rank == 1 ? 1.0F : 0.0F, at::TensorOptions(at::kFloat).device(device));
        engine.agree_nonfinite(found);
        engine.leave_out_where(found);
        require(!optimizer.step(), "a step left out");
        require(equal(contents_of(optimizer, model), before), "nothing changed");
        require(engine.report().nonfinite_steps == 1, "a step counted as left out");
        optimizer.zero_grad();
        train(optimizer, model, rank, 2);
        require(!equal(contents_of(optimizer, model), before), "the next step");
      });
      fake::check();
    }
  }
}

TEST_CASE("averages work with offload", "[offload]") {
  use_fake_devices();
  const Deterministic in_rank_order;
  for (const bool narrow : {false, true}) {
    zero::Options given;
    if (narrow) {
      given.param_dtype = "bfloat16";
    }
    for (int64_t stage = 0; stage <= 3; ++stage) {
      INFO("stage " << stage << (narrow ? " in bfloat16" : ""));
      require_equal_runs(
          stage, given, [&](int64_t rank, const auto& group, auto& options, bool device) {
            DeviceModel model(1, device_of(rank, device));
            zero::ZeroOptimizer optimizer(model, options, zero::AdamW{.lr = 1e-2}, group);
            zero::EMA ema(optimizer, 0.75);
            State seen;
            for (int64_t step = 0; step < 3; ++step) {
              train(optimizer, model, rank, step);
              ema.update();
              ema.swapped([&] {
                optimizer.gathered([&] { seen.push_back(model.tokens.detach().cpu().clone()); });
              });
            }
            train(optimizer, model, rank, 3);
            for (const at::Tensor& value : contents_of(optimizer, model)) {
              seen.push_back(value);
            }
            return seen;
          });
    }
  }
}

TEST_CASE("checkpoints are the same with and without offload", "[offload]") {
  use_fake_devices();
  const Deterministic in_rank_order;
  const TemporaryDirectory folder;
  for (int64_t stage = 0; stage <= 3; ++stage) {
    for (const bool narrow : {false, true}) {
      INFO("stage " << stage << (narrow ? " in bfloat16" : ""));
      zero::Options given;
      if (narrow) {
        given.param_dtype = "bfloat16";
      }
      const std::string name = folder / (std::to_string(stage) + (narrow ? "n" : "w"));
      require_equal_runs(
          stage, given, [&](int64_t rank, const auto& group, auto& options, bool device) {
            DeviceModel model(1, device_of(rank, device));
            zero::ZeroOptimizer optimizer(model, options, zero::AdamW{.lr = 1e-2}, group);
            train(optimizer, model, rank, 0);
            train(optimizer, model, rank, 1);
            zero::save(name + "-" + options.offload.value_or(""), model, &optimizer);
            train(optimizer, model, rank, 2);
            return contents_of(optimizer, model);
          });
      const auto expected = data_of(name + "-");
      REQUIRE(expected.size() >= 2);
      const std::vector<std::string> offloads = with_and_without(stage);
      for (const std::string& offload : offloads) {
        const bool same = data_of(name + "-" + offload) == expected;
        REQUIRE(same);
      }
      // The last one's files go on, with and without.
      require_equal_runs(
          stage, given, [&](int64_t rank, const auto& group, auto& options, bool device) {
            DeviceModel model(7, device_of(rank, device));
            zero::ZeroOptimizer optimizer(model, options, zero::AdamW{.lr = 1e-2}, group);
            zero::load(name + "-" + offloads.back(), model, &optimizer);
            train(optimizer, model, rank, 2);
            return contents_of(optimizer, model);
          });
    }
  }
}
