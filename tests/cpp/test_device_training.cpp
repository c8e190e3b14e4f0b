// Training on a device, without one: the same code runs on a fake device whose checker
// reports whatever streams and events leave unordered.

#include "catch.h"
#include "device_cases.h"

using namespace zero::test;

namespace {

zero::Options options_of(int64_t stage, const std::string& transport = "auto") {
  return {
      .stage = stage,
      .bucket_bytes = 8192,
      .first_bucket_bytes = 2048,
      .min_unit_numel = 0,
      .transport = transport,
      .timeout = 60.0};
}

void require_equal(const std::vector<DeviceRun>& runs, const DeviceRun& expected) {
  for (const DeviceRun& run : runs) {
    REQUIRE(equal(run.weights, expected.weights));
    REQUIRE(run.norms == expected.norms);
  }
}

} // namespace

TEST_CASE("training on a device has the CPU's bits at every stage", "[device]") {
  use_fake_devices();
  const Deterministic in_rank_order;
  for (const int64_t ranks : {1, 2, 3}) {
    DeviceTraining training{.options = options_of(0, "host"), .ranks = ranks, .on_device = false};
    const auto expected = train_all(training).front();
    training.on_device = true;
    for (int64_t stage = 0; stage <= 3; ++stage) {
      INFO("stage " << stage << " of " << ranks << " ranks");
      training.options = options_of(stage);
      require_equal(train_all(training), expected);
    }
  }
}

TEST_CASE("a device's tensors can go through the host", "[device]") {
  use_fake_devices();
  DeviceTraining training{.options = options_of(0, "host"), .on_device = false};
  const auto expected = train_all(training).front();
  training.on_device = true;
  for (const auto* transport : {"host", "group"}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      training.options = options_of(stage, transport);
      require_equal(train_all(training, /*synchronizes=*/true), expected);
    }
  }
}

TEST_CASE("16-bit gradients are summed as on the CPU", "[device]") {
  use_fake_devices();
  for (const auto* dtype : {"bfloat16", "float16"}) {
    DeviceTraining training{.options = options_of(0, "host"), .on_device = false};
    training.options.param_dtype = dtype;
    const auto expected = train_all(training).front();
    training.on_device = true;
    for (int64_t stage = 0; stage <= 3; ++stage) {
      INFO(dtype << " at stage " << stage);
      training.options = options_of(stage);
      training.options.param_dtype = dtype;
      require_equal(train_all(training), expected);
    }
  }
}

TEST_CASE("every rule steps on a device as on the CPU", "[device]") {
  use_fake_devices();
  const Deterministic in_rank_order;
  for (const zero::Rule& rule : std::vector<zero::Rule>{
           zero::Adam{.lr = 1e-2, .weight_decay = 0.1, .amsgrad = true},
           zero::SGD{.lr = 0.1, .momentum = 0.9, .nesterov = true},
           zero::Lion{.lr = 1e-3}}) {
    DeviceTraining training{.options = options_of(1, "host"), .rule = rule, .on_device = false};
    const auto expected = train_all(training).front();
    training.on_device = true;
    training.options = options_of(2);
    require_equal(train_all(training), expected);
  }
}

TEST_CASE("the backend's own sums differ by rounding only", "[device]") {
  use_fake_devices();
  DeviceTraining training{
      .options = options_of(0, "host"), .rule = zero::SGD{.lr = 0.1}, .on_device = false};
  const auto expected = train_all(training).front();
  training.on_device = true;
  for (int64_t stage = 0; stage <= 3; ++stage) {
    training.options = options_of(stage);
    for (const DeviceRun& run : train_all(training)) {
      REQUIRE(close(run.weights, expected.weights, 1e-5, 1e-6));
    }
  }
}

TEST_CASE("bytes held and sent on a device are the table's", "[device]") {
  use_fake_devices();
  for (int64_t stage = 0; stage <= 3; ++stage) {
    DeviceTraining training{.options = options_of(stage), .ranks = 3, .clips = false};
    training.on_device = false;
    training.options.transport = "host";
    const auto expected = train_all(training);
    training.on_device = true;
    training.options.transport = "auto";
    const auto runs = train_all(training);
    for (int64_t rank = 0; rank < 3; ++rank) {
      INFO("stage " << stage << ", rank " << rank);
      REQUIRE(runs[rank].report.traffic.bytes() == expected[rank].report.traffic.bytes());
      REQUIRE(runs[rank].report.held.parameters == expected[rank].report.held.parameters);
      REQUIRE(runs[rank].report.held.optimizer_state == expected[rank].report.held.optimizer_state);
      // The peak is the same in every step.
      for (size_t step = 3; step < runs[rank].peaks.size(); ++step) {
        REQUIRE(runs[rank].peaks[step] == runs[rank].peaks[2]);
      }
    }
  }
}
