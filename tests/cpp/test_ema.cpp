// Averages of weights, buffers that follow rank 0's, and gradients divided by tokens,
// at stages 0 to 3.

#include "catch.h"
#include "engine_cases.h"

using namespace zero::test;

namespace {

constexpr double kDecay = 0.75;

struct Net : torch::nn::Module {
  explicit Net(uint64_t seed = 3) {
    torch::NoGradGuard no_grad;
    a = register_module("a", torch::nn::Linear(5, 19));
    norm = register_module("norm", torch::nn::BatchNorm1d(19));
    b = register_module("b", torch::nn::Linear(19, 3));
    auto generator = seeded(seed);
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(torch::randn(parameter.sizes(), generator));
    }
  }
  at::Tensor loss(int64_t rank, int64_t step) {
    auto generator = seeded(100 * step + rank);
    const at::Tensor x = torch::randn({6, 5}, generator);
    return b(torch::tanh(norm(a(x)))).square().mean();
  }
  torch::nn::Linear a = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
  torch::nn::Linear b = nullptr;
};

template <typename Case>
void at_each_stage(int64_t ranks, const Case& run, zero::Options options = {}) {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage << ", " << ranks << " ranks");
    options.stage = stage;
    options.timeout = 20.0;
    options.min_unit_numel = 0;
    run_ranks(ranks, [&](int64_t rank, const auto& group) { run(options, rank, group); });
  }
}

State whole(zero::ZeroOptimizer& optimizer, torch::nn::Module& model) {
  State values;
  for (const at::Tensor& parameter : model.parameters()) {
    values.push_back(zero::full_param(optimizer, parameter));
  }
  return values;
}

void train(zero::ZeroOptimizer& optimizer, Net& model, int64_t rank, int64_t step) {
  model.loss(rank, step).backward();
  optimizer.step();
  optimizer.zero_grad();
}

State averages(zero::EMA& ema, torch::nn::Module& model) {
  State values;
  for (const at::Tensor& parameter : model.parameters()) {
    values.push_back(ema.average(parameter));
  }
  return values;
}

} // namespace

TEST_CASE("averages follow their rule and the weights come back", "[ema]") {
  at_each_stage(2, [](const zero::Options& options, int64_t rank, const auto& group) {
    const auto model = std::make_shared<Net>();
    zero::ZeroOptimizer optimizer(*model, options, zero::AdamW{.lr = 0.01}, group);
    zero::EMA ema(optimizer, kDecay);
    State want = whole(optimizer, *model);
    for (int64_t step = 0; step < 3; ++step) {
      train(optimizer, *model, rank, step);
      ema.update();
      const State now = whole(optimizer, *model);
      for (size_t i = 0; i < now.size(); ++i) {
        want[i].lerp_(now[i], 1.0 - kDecay);
      }
    }
    require(equal(averages(ema, *model), want), "averages by their rule");
    const State before = whole(optimizer, *model);
    ema.swapped([&] {
      optimizer.gathered(
          [&] { require(equal(weights_of(*model), want), "averages in the parameters"); });
      const std::string error = error_of([&] { optimizer.step(); });
      require(contains(error, "EMA"), "an error of a step with averages, got: " + error);
    });
    require(equal(whole(optimizer, *model), before), "the weights back");
    train(optimizer, *model, rank, 3);
  });
}

TEST_CASE("an average is loaded from a whole tensor", "[ema]") {
  at_each_stage(3, [](const zero::Options& options, int64_t, const auto& group) {
    const auto model = std::make_shared<Net>();
    zero::ZeroOptimizer optimizer(*model, options, zero::SGD{}, group);
    zero::EMA ema(optimizer);
    const at::Tensor value = torch::arange(95.0).view({19, 5});
    ema.load(optimizer.engine().index_of(model->a->weight), value);
    require(torch::equal(ema.average(model->a->weight), value), "what was loaded");
    const std::string error = error_of([&] { ema.load(0, torch::ones({2})); });
    require(contains(error, "a.weight"), "an error with the name, got: " + error);
    require(ema.bytes() > 0, "bytes counted");
  });
}

TEST_CASE("buffers follow rank 0 in each step", "[buffers]") {
  zero::Options options;
  options.sync_buffers = true;
  const auto run = [](const zero::Options& given, int64_t rank, const auto& group) {
    const auto model = std::make_shared<Net>();
    const auto plain = std::make_shared<Net>();
    zero::ZeroOptimizer optimizer(*model, given, zero::SGD{.lr = 0.0}, group);
    for (int64_t step = 0; step < 3; ++step) {
      plain->loss(0, step); // rank 0's own statistics
      train(optimizer, *model, rank, step);
      const auto want = plain->named_buffers();
      for (const auto& buffer : model->named_buffers()) {
        require(torch::allclose(buffer.value(), want[buffer.key()]), "rank 0's " + buffer.key());
      }
    }
  };
  at_each_stage(2, run, options);
}

TEST_CASE("gradients are divided by all ranks' tokens", "[gradients]") {
  zero::Options options;
  options.average = false;
  const auto run = [](const zero::Options& given, int64_t rank, const auto& group) {
    struct One : torch::nn::Module {
      One() {
        w = register_parameter("w", torch::ones({3}));
      }
      at::Tensor w;
    };
    const auto model = std::make_shared<One>();
    zero::ZeroOptimizer optimizer(*model, given, zero::SGD{.lr = 1.0}, group);
    const std::vector<std::vector<double>> tokens = {{2.0}, {4.0, 6.0, 8.0}};
    (model->w * torch::tensor(tokens[rank]).sum()).sum().backward();
    require(
        optimizer.divide_grad_(static_cast<double>(tokens[rank].size()), true) == 4.0, "4 tokens");
    require(
        torch::equal(zero::full_grad(optimizer, model->w), torch::full({3}, 5.0)),
        "the mean over tokens");
    const std::string error = error_of([&] { optimizer.divide_grad_(0.0); });
    require(contains(error, "divisor"), "an error of the divisor, got: " + error);
  };
  at_each_stage(2, run, options);
}
