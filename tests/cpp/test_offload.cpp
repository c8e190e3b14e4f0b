// Offload to the host's memory, on fake devices: the same bits as without, copies beside
// the device's work, and memory that is not on the device.

#include "catch.h"
#include "offload_cases.h"

#include <algorithm>

using namespace zero::test;
namespace fake = zero::fake;

namespace {

using fake::Entry;
using fake::Kind;

int64_t last_number() {
  const auto entries = fake::trace();
  return entries.empty() ? -1 : entries.back().number;
}

// Of a device, after `begin` up to `end`.
std::vector<Entry> window(int64_t begin, int64_t end) {
  std::vector<Entry> found;
  for (Entry& entry : fake::trace()) {
    if (entry.device == 0 && entry.number > begin && entry.number <= end) {
      found.push_back(std::move(entry));
    }
  }
  return found;
}

std::vector<Entry> named(const std::vector<Entry>& entries, const std::string& name) {
  std::vector<Entry> found;
  std::copy_if(entries.begin(), entries.end(), std::back_inserter(found), [&](const Entry& entry) {
    return entry.kind == Kind::operation && entry.name == name;
  });
  return found;
}

// The numbers of rank 0's last step, of three.
struct Numbers {
  int64_t begin = 0;
  int64_t backward = 0; // its end
  int64_t step = 0; // its end
  int64_t compute = 0; // the stream
  size_t buckets = 0; // that have gradients
};

Numbers trace_step(const zero::Options& options, bool clips) {
  Numbers numbers;
  run_ranks(2, [&](int64_t rank, const auto& group) {
    const c10::Device device = device_of(rank, true);
    DeviceModel model(1, device);
    zero::ZeroOptimizer optimizer(model, options, zero::AdamW{.lr = 1e-2}, group);
    for (int64_t step = 0; step < 3; ++step) {
      const at::Tensor tokens = tokens_of(step, rank).to(device);
      const int64_t begin = last_number();
      {
        std::unique_ptr<fake::NoSynchronization> never;
        if (step > 0) {
          never = std::make_unique<fake::NoSynchronization>(device.index());
        }
        loss_of(model, tokens).backward();
      }
      const int64_t backward = last_number();
      if (clips) {
        optimizer.clip_grad_norm_(0.1);
      }
      optimizer.step();
      if (rank == 0) {
        numbers = {begin, backward, last_number(), fake::current_stream(0).id()};
      }
      optimizer.zero_grad();
    }
    optimizer.synchronize();
  });
  fake::check();
  return numbers;
}

zero::Options small_buckets(int64_t stage, const std::string& offload) {
  return offload_options(stage, true, offload);
}

int64_t state_bytes(const zero::Engine::Report& report) {
  return report.held.optimizer_state;
}

} // namespace

TEST_CASE("offload has the bits of training without it", "[offload]") {
  use_fake_devices();
  const Deterministic in_rank_order;
  for (const int64_t ranks : {1, 2, 3}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      const auto expected = live(offload_options(stage, false, ""), ranks, false);
      REQUIRE(expected.steps_left_out == 1);
      for (const std::string& offload : offloads_of(stage)) {
        INFO("offload=" << offload << " at stage " << stage << " of " << ranks << " ranks");
        const auto lived = live(offload_options(stage, true, offload), ranks, true);
        REQUIRE(equal(lived.contents, expected.contents));
        REQUIRE(lived.norms == expected.norms);
        REQUIRE(lived.steps_left_out == 1);
      }
    }
  }
}

TEST_CASE("offload has the same bits in 16 bits, with masters on the host", "[offload]") {
  use_fake_devices();
  const Deterministic in_rank_order;
  for (const auto* dtype : {"bfloat16", "float16"}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      auto options = offload_options(stage, false, "");
      options.param_dtype = dtype;
      const auto expected = live(options, 2, false);
      for (const std::string& offload : offloads_of(stage)) {
        INFO(dtype << ", offload=" << offload << " at stage " << stage);
        options = offload_options(stage, true, offload);
        options.param_dtype = dtype;
        const auto lived = live(options, 2, true);
        REQUIRE(equal(lived.contents, expected.contents));
        REQUIRE(lived.norms == expected.norms);
      }
    }
  }
}

TEST_CASE("offload works with other dtypes of gradients and transports", "[offload]") {
  use_fake_devices();
  const Deterministic in_rank_order;
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    auto options = offload_options(stage, false, "");
    options.reduce_dtype = "bfloat16";
    const auto expected = live(options, 2, false);
    for (const auto* transport : {"auto", "host"}) {
      auto offloaded = offload_options(stage, true, offloads_of(stage).back());
      offloaded.reduce_dtype = "bfloat16";
      offloaded.transport = transport;
      REQUIRE(equal(live(offloaded, 2, true).contents, expected.contents));
    }
  }
}

TEST_CASE("offload steps in backward", "[offload]") {
  use_fake_devices();
  const Deterministic in_rank_order;
  const auto train = [](const zero::Options& options, bool on_device) {
    std::vector<State> contents(2);
    run_ranks(2, [&](int64_t rank, const auto& group) {
      const c10::Device device = device_of(rank, on_device);
      DeviceModel model(1, device);
      zero::ZeroOptimizer optimizer(model, options, zero::AdamW{.lr = 1e-2}, group);
      for (int64_t step = 0; step < 4; ++step) {
        loss_of(model, tokens_of(step, rank).to(device)).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      contents[rank] = contents_of(optimizer, model);
    });
    fake::check();
    require(equal(contents[0], contents[1]), "equal values on all ranks");
    return contents[0];
  };
  for (int64_t stage = 0; stage <= 3; ++stage) {
    const State expected = train(offload_options(stage, false, ""), false);
    for (const std::string& offload : offloads_of(stage)) {
      INFO("offload=" << offload << " at stage " << stage);
      auto options = offload_options(stage, true, offload);
      options.step_in_backward = true;
      REQUIRE(equal(train(options, true), expected));
    }
  }
}

TEST_CASE("gradients go to the host beside backward", "[offload]") {
  use_fake_devices();
  for (int64_t stage = 1; stage <= 3; ++stage) {
    for (const std::string& offload : offloads_of(stage)) {
      INFO("offload=" << offload << " at stage " << stage);
      fake::reset();
      const Numbers numbers = trace_step(small_buckets(stage, offload), /*clips=*/false);
      const auto backward = window(numbers.begin, numbers.backward);
      const auto copies = named(backward, "copy to host");
      REQUIRE(copies.size() >= 3);
      for (const Entry& copy : copies) {
        REQUIRE(copy.stream == copies.front().stream);
        REQUIRE(copy.stream != numbers.compute);
      }
      // Backward goes on after the first was queued.
      REQUIRE(std::count_if(backward.begin(), backward.end(), [&](const Entry& entry) {
                return entry.kind == Kind::operation && entry.stream == numbers.compute &&
                    entry.number > copies.front().number;
              }) > 10);
      // The step copies none again.
      REQUIRE(named(window(numbers.backward, numbers.step), "copy to host").empty());
    }
  }
}

TEST_CASE("weights go back while the next bucket is stepped", "[offload]") {
  use_fake_devices();
  for (const auto* dtype : {"float32", "bfloat16"}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      INFO(dtype << " at stage " << stage);
      fake::reset();
      auto options = small_buckets(stage, "optimizer");
      options.param_dtype = dtype;
      const Numbers numbers = trace_step(options, /*clips=*/true);
      const auto step = window(numbers.backward, numbers.step);
      const auto down = named(step, "copy to host");
      const auto up = named(step, "copy to device");
      REQUIRE(down.size() >= 3);
      REQUIRE(up.size() >= down.size());
      // Clipping changed gradients: all copies were queued before the first bucket's step.
      REQUIRE(down.back().number < up.front().number);
      for (const Entry& copy : up) {
        REQUIRE(copy.stream == up.front().stream);
        REQUIRE(copy.stream != numbers.compute);
        REQUIRE(copy.stream != down.front().stream);
      }
      // The host waits for a bucket's gradient after it has queued the last one's weights.
      const auto waits = std::count_if(step.begin(), step.end(), [&](const Entry& entry) {
        return entry.kind == Kind::synchronize && entry.number > up.front().number &&
            entry.number < up.back().number;
      });
      REQUIRE(waits >= static_cast<int64_t>(down.size()) - 1);
    }
  }
}

TEST_CASE("shards of the host are gathered beside the device's work", "[offload]") {
  use_fake_devices();
  const Numbers numbers = trace_step(small_buckets(3, "parameters"), /*clips=*/false);
  const auto copies = named(window(numbers.begin, numbers.backward), "copy to device");
  REQUIRE(copies.size() >= 4);
  for (const Entry& copy : copies) {
    REQUIRE(copy.stream == copies.front().stream);
    REQUIRE(copy.stream != numbers.compute);
  }
  REQUIRE(named(window(numbers.backward, numbers.step), "copy to device").empty());
}

TEST_CASE("what is offloaded takes no memory of the device", "[offload]") {
  use_fake_devices();
  for (int64_t stage = 0; stage <= 3; ++stage) {
    for (const auto* dtype : {"float32", "bfloat16"}) {
      std::vector<int64_t> bytes;
      std::vector<zero::Engine::Report> reports;
      std::vector<std::string> offloads = offloads_of(stage);
      offloads.insert(offloads.begin(), "");
      for (const std::string& offload : offloads) {
        auto options = offload_options(stage, true, offload);
        options.param_dtype = dtype;
        bytes.push_back(0);
        reports.emplace_back();
        run_ranks(2, [&](int64_t rank, const auto& group) {
          const c10::Device device = device_of(rank, true);
          DeviceModel model(1, device);
          zero::ZeroOptimizer optimizer(model, options, zero::AdamW{}, group);
          for (int64_t step = 0; step < 2; ++step) {
            loss_of(model, tokens_of(step, rank).to(device)).backward();
            optimizer.step();
            optimizer.zero_grad();
          }
          optimizer.synchronize();
          if (rank == 0) {
            bytes.back() = fake::memory(device.index()).bytes;
            reports.back() = optimizer.engine().report();
          }
        });
      }
      INFO("stage " << stage << ", " << dtype);
      const bool masters = std::string(dtype) == "bfloat16";
      const zero::Engine::Report& plain = reports[0];
      const zero::Engine::Report& offloaded = reports[1];
      REQUIRE(bytes[1] <= bytes[0] - state_bytes(plain));
      // Masters and moments are 12 bytes a parameter: fp32 is stepped in a copy.
      const int64_t copied =
          offloaded.theory_held.optimizer_state - plain.theory_held.optimizer_state;
      REQUIRE(copied * 2 == (masters ? 0 : plain.theory_held.optimizer_state));
      REQUIRE(state_bytes(offloaded) - state_bytes(plain) >= copied);
      REQUIRE(state_bytes(offloaded) - state_bytes(plain) <= copied + plain.padding);
      REQUIRE(offloaded.held.parameters == plain.held.parameters);
      // Gradients are twice there: this rank's part of them on the host.
      const int64_t part = plain.theory_held.parameters / (stage == 1 || stage == 2 ? 2 : 1);
      REQUIRE(offloaded.theory_held.gradients == plain.theory_held.gradients + part);
      REQUIRE(
          offloaded.held.gradients - plain.held.gradients >=
          offloaded.theory_held.gradients - plain.theory_held.gradients);
      if (stage == 3) {
        REQUIRE(bytes[2] <= bytes[1] - reports[2].held.parameters);
        REQUIRE(reports[2].held.parameters == plain.held.parameters);
      }
    }
  }
}

TEST_CASE("what can't be offloaded is refused", "[offload]") {
  use_fake_devices();
  const auto error = [](const zero::Options& options, bool on_device) {
    return error_of([&] {
      DeviceModel model(1, device_of(0, on_device));
      const zero::ZeroOptimizer optimizer(model, options, zero::AdamW{});
    });
  };
  zero::Options options{.stage = 1};
  options.offload = "optimizer";
  check_contains(
      error(options, false),
      {"expected parameters on a device with offload=\"optimizer\"",
       "got 'tokens' on the CPU",
       "nothing to offload",
       "rank 0 of 1"});
  options.offload = "parameters";
  check_contains(error(options, true), {"expected stage 3 with offload=\"parameters\"", "stage 1"});
  options.offload = "disk";
  check_contains(
      error(options, true), {"expected offload to be unset, optimizer or parameters", "disk"});
}
