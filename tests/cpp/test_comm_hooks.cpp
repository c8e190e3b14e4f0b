// Comm hooks: what replaces the reduction of a gradient bucket, at every stage, against
// arithmetic on the gradients that one process computes for each rank.

#include "catch.h"

#include <mutex>

#include "engine_cases.h"

using namespace zero::test;

namespace {

using Hook = std::shared_ptr<zero::CommHook>;

zero::Options options_of(int64_t stage, const std::string& transport = "auto") {
  return {
      .stage = stage,
      .bucket_bytes = 8192,
      .first_bucket_bytes = 2048,
      .min_unit_numel = 0,
      .transport = transport,
      .timeout = 30.0};
}

State local_gradients(GPT& model, int64_t rank, int64_t micro = 0) {
  model.zero_grad();
  loss_of(model, tokens_of(0, rank, micro)).backward();
  State own;
  for (const at::Tensor& parameter : model.parameters()) {
    own.push_back(parameter.grad().clone());
  }
  return own;
}

// What ranks send, made from their gradients, and summed in rank order in fp32.
template <typename Sent>
State summed(int64_t ranks, const Sent& sent, int64_t micro = 0) {
  const auto model = make_gpt();
  State sum;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const State own = local_gradients(*model, rank, micro);
    for (size_t i = 0; i < own.size(); ++i) {
      const at::Tensor term = sent(own[i]);
      if (rank == 0) {
        sum.push_back(term);
      } else {
        sum[i] = sum[i] + term;
      }
    }
  }
  return sum;
}

State divided(State sum, int64_t ranks) {
  for (at::Tensor& gradient : sum) {
    gradient = gradient / static_cast<double>(ranks);
  }
  return sum;
}

at::Tensor through(const at::Tensor& gradient, c10::ScalarType dtype) {
  return gradient.to(dtype).to(at::kFloat);
}

State bf16_mean(int64_t ranks, int64_t micro = 0) {
  return divided(
      summed(ranks, [](const at::Tensor& g) { return through(g, at::kBFloat16); }, micro), ranks);
}

State full_gradients(zero::ZeroOptimizer& optimizer, GPT& model) {
  State whole;
  for (const at::Tensor& parameter : model.parameters()) {
    whole.push_back(zero::full_grad(optimizer, parameter));
  }
  return whole;
}

// One backward of each rank with the hook, and what came of it.
State reduced(
    const zero::Options& options,
    int64_t rank,
    const Group& group,
    const Hook& hook,
    zero::comm::Traffic* traffic = nullptr) {
  const auto model = make_gpt();
  zero::ZeroOptimizer optimizer(*model, options, zero::SGD{.lr = 0.1}, group);
  optimizer.register_comm_hook(hook);
  loss_of(*model, tokens_of(0, rank)).backward();
  const State gradients = full_gradients(optimizer, *model);
  if (traffic != nullptr) {
    *traffic = optimizer.engine().report().traffic;
  }
  return gradients;
}

// Reduces over a communicator of its own, and gives the mean of the whole bucket.
Hook hook_of_own(const Group& group, bool shard) {
  const std::shared_ptr<zero::comm::Communicator> own =
      zero::comm::make_communicators(group, 30.0, 1, "group").front();
  return zero::make_comm_hook("own", [own, shard](const zero::GradientBucket& bucket) {
    own->all_reduce(
           bucket.gradients,
           {static_cast<double>(bucket.world_size), {}},
           {"my bucket", bucket.index})
        ->wait();
    return shard ? bucket.shard() : bucket.gradients;
  });
}

} // namespace

TEST_CASE("bf16 compression sums rounded gradients in fp32, bit for bit", "[hooks]") {
  const std::string transport = GENERATE(as<std::string>{}, "host", "group");
  for (const int64_t ranks : {1, 2, 3}) {
    const State expected = bf16_mean(ranks);
    for (int64_t stage = 0; stage <= 3; ++stage) {
      INFO(transport << ", stage " << stage << " of " << ranks << " ranks");
      run_ranks(ranks, [&](int64_t rank, const auto& group) {
        const State got = reduced(options_of(stage, transport), rank, group, zero::compress_bf16());
        require(equal(got, expected), "the mean of gradients rounded to bfloat16");
      });
    }
  }
}

TEST_CASE("fp16 compression divides before it rounds", "[hooks]") {
  constexpr int64_t kRanks = 3;
  const State expected =
      summed(kRanks, [](const at::Tensor& g) { return through(g / 3.0, at::kHalf); });
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    run_ranks(kRanks, [&](int64_t rank, const auto& group) {
      const State got = reduced(options_of(stage), rank, group, zero::compress_fp16());
      require(equal(got, expected), "the sum of gradients divided and rounded to float16");
    });
  }
}

TEST_CASE("compression halves what is reduced, as the theory says", "[hooks]") {
  constexpr int64_t kRanks = 2;
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    run_ranks(kRanks, [&](int64_t rank, const auto& group) {
      zero::comm::Traffic plain;
      zero::comm::Traffic compressed;
      reduced(options_of(stage), rank, group, nullptr, &plain);
      reduced(options_of(stage), rank, group, zero::compress_bf16(), &compressed);
      if (stage == 0) { // summed in fp32, and gathered so
        const int64_t half = plain.all_reduce.bytes / 2;
        require(compressed.reduce_scatter.bytes * 2 == half, "half of the reduce-scatter");
        require(compressed.all_gather.bytes == half, "all of the gather");
        require(compressed.all_reduce.bytes == 0, "nothing else");
      } else {
        require(plain.reduce_scatter.bytes > 0, "traffic");
        require(
            compressed.reduce_scatter.bytes * 2 == plain.reduce_scatter.bytes,
            "half of the reduce-scatter");
      }
      const auto model = make_gpt();
      zero::ZeroOptimizer optimizer(*model, options_of(stage), zero::SGD{.lr = 0.1}, group);
      int64_t numel = 0;
      for (const at::Tensor& parameter : model->parameters()) {
        numel += parameter.numel();
      }
      const int64_t before = optimizer.engine().report().theory_traffic;
      optimizer.register_comm_hook(zero::compress_fp16());
      const int64_t after = optimizer.engine().report().theory_traffic;
      require(before - after == 2 * numel / 2, "a theory with half of the reduce-scatter");
    });
  }
}

TEST_CASE("a hook of one's own gives the whole bucket or its shard", "[hooks]") {
  constexpr int64_t kRanks = 3;
  const State expected = divided(summed(kRanks, [](const at::Tensor& g) { return g; }), kRanks);
  for (int64_t stage = 0; stage <= 3; ++stage) {
    for (const bool shard : {false, true}) {
      INFO("stage " << stage << (shard ? ", a shard" : ", the whole"));
      run_ranks(kRanks, [&](int64_t rank, const auto& group) {
        const State got = reduced(options_of(stage), rank, group, hook_of_own(group, shard));
        require(equal(got, expected), "the mean of gradients");
      });
    }
  }
}

TEST_CASE("hooks see each bucket once, whole, with its names", "[hooks]") {
  run_ranks(2, [](int64_t rank, const auto& group) {
    std::vector<int64_t> indices;
    std::vector<std::string> names;
    const Hook hook = zero::make_comm_hook("look", [&](const zero::GradientBucket& bucket) {
      require(bucket.rank == rank && bucket.world_size == 2, "this rank of two");
      require(bucket.gradients.dim() == 1 && bucket.gradients.is_contiguous(), "a flat bucket");
      const at::Tensor half = bucket.gradients.chunk(2)[rank];
      require(bucket.shard().data_ptr() == half.data_ptr(), "this rank's half");
      require(bucket.shard().numel() == half.numel(), "half of the elements");
      indices.push_back(bucket.index);
      names.insert(names.end(), bucket.names.begin(), bucket.names.end());
      return bucket.gradients;
    });
    reduced(options_of(2), rank, group, hook);
    require(indices.size() > 2, "several buckets");
    std::sort(indices.begin(), indices.end());
    require(std::unique(indices.begin(), indices.end()) == indices.end(), "each bucket once");
    std::sort(names.begin(), names.end());
    std::vector<std::string> all;
    const auto model = make_gpt();
    for (const auto& item : model->named_parameters()) {
      all.push_back(item.key());
    }
    std::sort(all.begin(), all.end());
    require(names == all, "each parameter's name once");
  });
}

TEST_CASE("compressed gradients of several backwards add up in fp32", "[hooks]") {
  constexpr int64_t kRanks = 2;
  State expected = bf16_mean(kRanks, 0);
  const State second = bf16_mean(kRanks, 1);
  for (size_t i = 0; i < expected.size(); ++i) {
    expected[i] = expected[i] + second[i];
  }
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    run_ranks(kRanks, [&](int64_t rank, const auto& group) {
      const auto model = make_gpt();
      zero::ZeroOptimizer optimizer(*model, options_of(stage), zero::SGD{.lr = 0.1}, group);
      optimizer.register_comm_hook(zero::compress_bf16());
      loss_of(*model, tokens_of(0, rank, 0)).backward();
      loss_of(*model, tokens_of(0, rank, 1)).backward();
      require(equal(full_gradients(optimizer, *model), expected), "the sum of two means");
    });
  }
}

TEST_CASE("what no_sync accumulated is compressed once", "[hooks]") {
  constexpr int64_t kRanks = 2;
  const auto reference = make_gpt();
  State expected;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    const State first = local_gradients(*reference, rank, 0);
    const State second = local_gradients(*reference, rank, 1);
    for (size_t i = 0; i < first.size(); ++i) {
      const at::Tensor term = through(first[i] + second[i], at::kBFloat16);
      if (rank == 0) {
        expected.push_back(term);
      } else {
        expected[i] = (expected[i] + term) / 2.0;
      }
    }
  }
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    run_ranks(kRanks, [&](int64_t rank, const auto& group) {
      const auto model = make_gpt();
      zero::ZeroOptimizer optimizer(*model, options_of(stage), zero::SGD{.lr = 0.1}, group);
      optimizer.register_comm_hook(zero::compress_bf16());
      {
        const auto quiet = optimizer.no_sync();
        loss_of(*model, tokens_of(0, rank, 0)).backward();
      }
      loss_of(*model, tokens_of(0, rank, 1)).backward();
      require(equal(full_gradients(optimizer, *model), expected), "the rounded sum's mean");
    });
  }
}

TEST_CASE("gradients of 16 bits travel as they are", "[hooks]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    run_ranks(2, [&](int64_t rank, const auto& group) {
      zero::Options options = options_of(stage);
      options.param_dtype = "bfloat16";
      zero::comm::Traffic plain;
      zero::comm::Traffic hooked;
      const State expected = reduced(options, rank, group, nullptr, &plain);
      const State got = reduced(options, rank, group, zero::compress_fp16(), &hooked);
      require(equal(got, expected), "the same gradients");
      const int64_t sent = plain.reduce_scatter.bytes + plain.all_reduce.bytes / 2;
      require(hooked.reduce_scatter.bytes == sent, "the same traffic");
    });
  }
}

TEST_CASE("a hook that was removed leaves nothing behind", "[hooks]") {
  run_ranks(2, [](int64_t rank, const auto& group) {
    const State expected = reduced(options_of(2), rank, group, nullptr);
    const auto model = make_gpt();
    zero::ZeroOptimizer optimizer(*model, options_of(2), zero::SGD{.lr = 0.1}, group);
    optimizer.register_comm_hook(zero::compress_bf16());
    loss_of(*model, tokens_of(0, rank)).backward();
    require(!equal(full_gradients(optimizer, *model), expected), "rounded gradients");
    optimizer.zero_grad();
    optimizer.register_comm_hook(nullptr);
    loss_of(*model, tokens_of(0, rank)).backward();
    require(equal(full_gradients(optimizer, *model), expected), "exact gradients");
  });
}

TEST_CASE("ranks with different hooks are told of both", "[hooks]") {
  run_ranks(3, [](int64_t rank, const auto& group) {
    const auto model = make_gpt();
    zero::ZeroOptimizer optimizer(*model, options_of(1), zero::SGD{.lr = 0.1}, group);
    const Hook hook = rank == 2 ? nullptr : zero::compress_bf16();
    const std::string error = error_of([&] { optimizer.register_comm_hook(hook); });
    check_contains(error, {"'bf16' on rank 0", "none on rank 2", "nothing was changed"});
    // And nothing was.
    loss_of(*model, tokens_of(0, rank)).backward();
    const State expected = divided(summed(3, [](const at::Tensor& g) { return g; }), 3);
    require(equal(full_gradients(optimizer, *model), expected), "the plain mean");
  });
}

TEST_CASE("a hook's result of the wrong shape or dtype is refused by name", "[hooks]") {
  const auto stage = GENERATE(0, 1, 2, 3);
  run_ranks(2, [&](int64_t rank, const auto& group) {
    const std::string shape = error_of([&] {
      reduced(options_of(stage), rank, group, zero::make_comm_hook("short", [](const auto& bucket) {
                return bucket.gradients.slice(0, 0, 3);
              }));
    });
    check_contains(shape, {"the whole bucket", "got [3]", "bucket ", " of 2)"});
    const std::string dtype = error_of([&] {
      reduced(options_of(stage), rank, group, zero::make_comm_hook("wide", [](const auto& bucket) {
                return bucket.gradients.to(at::kDouble);
              }));
    });
    check_contains(dtype, {"dtype Float", "got Double", "bucket ", " of 2)"});
  });
}

TEST_CASE("a hook's own error comes out of backward, and the next one is clean", "[hooks]") {
  const auto stage = GENERATE(0, 1, 2, 3);
  run_ranks(2, [&](int64_t rank, const auto& group) {
    const State expected = reduced(options_of(stage, "host"), rank, group, nullptr);
    const auto model = make_gpt();
    zero::ZeroOptimizer optimizer(*model, options_of(stage, "host"), zero::SGD{.lr = 0.1}, group);
    bool fails = rank == 1;
    optimizer.register_comm_hook(
        zero::make_comm_hook("fails", [&](const zero::GradientBucket& bucket) {
          TORCH_CHECK(!fails, "the hook's own error");
          return bucket.gradients;
        }));
    const std::string error = error_of([&] { loss_of(*model, tokens_of(0, rank)).backward(); });
    check_contains(error, {rank == 1 ? "the hook's own error" : "rank 1"});
    fails = false;
    optimizer.zero_grad();
    optimizer.register_comm_hook(nullptr);
    loss_of(*model, tokens_of(0, rank)).backward();
    require(equal(full_gradients(optimizer, *model), expected), "the mean after the error");
  });
}

TEST_CASE("no hook is registered inside backward", "[hooks]") {
  const auto model = make_gpt();
  zero::ZeroOptimizer optimizer(*model, options_of(1), zero::SGD{.lr = 0.1});
  std::string error;
  model->parameters().front().register_hook([&](const at::Tensor& gradient) {
    error = error_of([&] { optimizer.register_comm_hook(nullptr); });
    return gradient;
  });
  loss_of(*model, tokens_of(0, 0)).backward();
  REQUIRE(contains(error, "inside backward"));
}
