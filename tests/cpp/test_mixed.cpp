// Parameters that compute in 16 bits: sums over ranks of wider dtypes, and training
// against one process that keeps its own fp32 masters.

#include "catch.h"

#include <mutex>

#include "engine_cases.h"
#include "transports.h"

using namespace zero::test;

namespace {

constexpr int64_t kRanks = 2;

void round_into(GPT& model, const State& masters) {
  torch::NoGradGuard no_grad;
  const auto parameters = model.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor parameter = parameters[i];
    parameter.copy_(masters[i]); // rounds
  }
}

// The mean of what each rank's 16-bit model computes, rounded once.
State rounded_mean(GPT& model, int64_t step) {
  State sum;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    model.zero_grad();
    loss_of(model, tokens_of(step, rank)).backward();
    const auto parameters = model.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor own = parameters[i].grad().to(at::kFloat);
      if (rank == 0) {
        sum.push_back(own);
      } else {
        sum[i] = sum[i] + own;
      }
    }
  }
  for (at::Tensor& gradient : sum) {
    gradient = (gradient / static_cast<double>(kRanks)).to(at::kBFloat16);
  }
  return sum;
}

State full_parameters(zero::ZeroOptimizer& optimizer, GPT& model) {
  State whole;
  for (const at::Tensor& parameter : model.parameters()) {
    whole.push_back(zero::full_param(optimizer, parameter));
  }
  return whole;
}

State train(int64_t stage, int64_t rank, const Group& group) {
  const auto model = make_gpt(1 + rank); // rank 0's values win
  const auto reference = make_gpt(1);
  State masters = weights_of(*reference);
  reference->to(at::kBFloat16);
  zero::ZeroOptimizer optimizer(
      *model,
      {.stage = stage, .min_unit_numel = 0, .param_dtype = "bfloat16"},
      zero::SGD{.lr = 0.5, .momentum = 0.9},
      group);
  State momenta;
  for (int64_t step = 0; step < 4; ++step) {
    loss_of(*model, tokens_of(step, rank)).backward();
    round_into(*reference, masters);
    const State expected = rounded_mean(*reference, step);
    const auto parameters = model->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      require(parameters[i].scalar_type() == at::kBFloat16, "bfloat16 parameters");
      const at::Tensor ours = zero::full_grad(optimizer, parameters[i]);
      require(torch::equal(ours.to(at::kFloat), expected[i].to(at::kFloat)), "the mean gradient");
      const at::Tensor gradient = expected[i].to(at::kFloat);
      if (step == 0) {
        momenta.push_back(gradient.clone());
      } else {
        momenta[i] = momenta[i] * 0.9 + gradient;
      }
      masters[i] = masters[i] - 0.5 * momenta[i];
    }
    optimizer.step();
    optimizer.zero_grad();
    const State whole = full_parameters(optimizer, *model);
    require(close(whole, masters, 1e-5, 1e-6), "the masters of one process");
    masters = whole; // a last bit can change a rounded weight
  }
  return masters;
}

} // namespace

TEST_CASE("bf16 training with masters is one process's, equal at every stage", "[mixed]") {
  State first;
  for (int64_t stage = 0; stage < 4; ++stage) {
    std::mutex mutex;
    std::vector<State> of_ranks(kRanks);
    run_ranks(kRanks, [&](int64_t rank, const auto& group) {
      State own = train(stage, rank, group);
      const std::lock_guard lock(mutex);
      of_ranks[rank] = std::move(own);
    });
    INFO("stage " << stage);
    REQUIRE(of_ranks[0].front().scalar_type() == at::kFloat);
    REQUIRE(equal(of_ranks[0], of_ranks[1]));
    first = first.empty() ? of_ranks[0] : first;
    REQUIRE(equal(of_ranks[0], first));
  }
}

TEST_CASE("sums of 16-bit gradients come out in fp32", "[mixed]") {
  const std::string transport = GENERATE(as<std::string>{}, "group", "host", "staged");
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf);
  const int64_t shard = GENERATE(3, 64, 100000);
  INFO(transport << ", " << shard);
  const auto input_of = [&](int64_t rank) {
    auto generator = seeded(17 + rank);
    return torch::randn({kRanks * shard}, generator).to(dtype);
  };
  run_ranks(kRanks, [&](int64_t rank, const auto& group) {
    const auto comm = make_communicators_over(transport, group, 30.0, 1).front();
    const at::Tensor before = torch::full({shard}, 0.25);
    const at::Tensor out = before.clone();
    comm->reduce_scatter(out, input_of(rank), {3.0, {}}, {.what = "a sum"})->wait();
    at::Tensor expected = torch::zeros({shard});
    for (int64_t peer = 0; peer < kRanks; ++peer) {
      const at::Tensor theirs = input_of(peer).slice(0, rank * shard, (rank + 1) * shard);
      expected = expected + theirs.to(at::kFloat);
    }
    expected = expected / 3.0;
    require(torch::equal(out, expected), "the sum in fp32");
    comm->reduce_scatter(out, input_of(rank), {3.0, out}, {.what = "a second"})->wait();
    require(torch::equal(out, expected + expected), "the sum added");
    const std::string error = error_of(
        [&] { comm->reduce_scatter(out.to(at::kDouble), input_of(rank), {}, {.what = "a sum"}); });
    require(contains(error, "float32 for an input of 16 bits"), "an error, got " + error);
  });
}
