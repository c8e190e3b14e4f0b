// What users do around a step, at stages 0 to 2, with ranks as threads.

#include "catch.h"
#include "engine_cases.h"

#include <zero/optim/elementwise.h>

using namespace zero::test;

namespace {

// A module of free parameters.
struct Free : torch::nn::Module {
  at::Tensor add(const std::string& name, at::Tensor value, bool trainable = true) {
    return register_parameter(name, std::move(value), trainable);
  }
};

zero::Options options_of(int64_t stage) {
  return {.stage = stage, .timeout = 20.0};
}

// Runs a case at stages 0 to 2 on `ranks` ranks.
template <typename Case>
void at_each_stage(int64_t ranks, Case&& run) {
  for (int64_t stage = 0; stage <= 2; ++stage) {
    INFO("stage " << stage << ", " << ranks << " ranks");
    run_ranks(ranks, [&](int64_t rank, const auto& group) { run(stage, rank, group); });
  }
}

bool is(const at::Tensor& tensor, std::vector<double> values, double tolerance = 1e-6) {
  const at::Tensor expected = torch::tensor(values, tensor.options().requires_grad(false));
  return torch::allclose(tensor.flatten(), expected, tolerance, tolerance);
}

} // namespace

TEST_CASE("several backwards add up, with and without no_sync, in any order", "[engine]") {
  for (int64_t pattern = 0; pattern < 8; ++pattern) {
    at_each_stage(2, [&](int64_t stage, int64_t rank, const auto& group) {
      Free model;
      const at::Tensor w = model.add("w", torch::ones({1}));
      zero::ZeroOptimizer optimizer(model, options_of(stage), zero::SGD{.lr = 1.0}, group);
      for (int64_t micro = 0; micro < 3; ++micro) {
        const auto backward = [&] {
          (w * static_cast<double>(3 * rank + micro + 1)).sum().backward();
        };
        if ((pattern >> micro) & 1) {
          const auto quiet = optimizer.no_sync();
          backward();
        } else {
          backward();
        }
      }
      require(is(zero::full_grad(optimizer, w), {10.5}), "gradient 10.5");
      optimizer.step();
      require(is(zero::full_param(optimizer, w), {-9.5}), "weight -9.5");
    });
  }
}

TEST_CASE("kept gradients are not reduced again", "[engine]") {
  at_each_stage(2, [](int64_t stage, int64_t, const auto& group) {
    Free model;
    const at::Tensor w = model.add("w", torch::ones({3}));
    zero::ZeroOptimizer optimizer(model, options_of(stage), zero::SGD{.lr = 0.0}, group);
    for (double expected = 1; expected <= 3; ++expected) {
      w.sum().backward();
      require(is(zero::full_grad(optimizer, w), {expected, expected, expected}), "1, 2, 3");
      optimizer.step();
    }
  });
}

TEST_CASE("average=false sums, also over several backwards", "[engine]") {
  at_each_stage(3, [](int64_t stage, int64_t rank, const auto& group) {
    Free model;
    const at::Tensor w = model.add("w", torch::ones({1}));
    zero::Options options = options_of(stage);
    options.average = false;
    zero::ZeroOptimizer optimizer(model, options, zero::SGD{}, group);
    for (int64_t micro = 0; micro < 2; ++micro) {
      (w * static_cast<double>(rank + 1)).sum().backward();
    }
    require(is(zero::full_grad(optimizer, w), {12.0}), "gradient 12");
  });
}

TEST_CASE("a parameter used on one rank counts as zero on the others", "[engine]") {
  at_each_stage(2, [](int64_t stage, int64_t rank, const auto& group) {
    Free model;
    const at::Tensor trunk = model.add("trunk", torch::ones({2}));
    const at::Tensor head = model.add("head", torch::ones({2}));
    const at::Tensor unused = model.add("unused", torch::ones({2}));
    zero::ZeroOptimizer optimizer(
        model, options_of(stage), zero::AdamW{.lr = 0.1, .weight_decay = 0.1}, group);
    (rank == 1 ? (trunk + head).sum() : trunk.sum()).backward();
    require(head.grad().defined(), "a gradient of head on every rank");
    require(!unused.grad().defined(), "no gradient of unused");
    require(is(zero::full_grad(optimizer, head), {0.5, 0.5}), "0.5");
    optimizer.step();
    require(is(zero::full_param(optimizer, unused), {1.0, 1.0}), "unused unchanged");
    require(zero::full_state(optimizer, unused).empty(), "no state of unused");
    optimizer.zero_grad();
    require(!head.grad().defined(), "gradients cleared");
    (trunk + head).sum().backward();
    optimizer.step();
    require(zero::full_state(optimizer, head)["step"].item<float>() == 2.0F, "two steps");
  });
}

TEST_CASE("step counts are each parameter's own", "[engine]") {
  at_each_stage(2, [](int64_t stage, int64_t, const auto& group) {
    Free model;
    const at::Tensor a = model.add("a", torch::ones({1}));
    const at::Tensor b = model.add("b", torch::ones({1}));
    zero::ZeroOptimizer optimizer(
        model, options_of(stage), zero::AdamW{.lr = 0.1, .weight_decay = 0.1}, group);
    for (int64_t i = 1; i <= 5; ++i) {
      at::Tensor loss = (a * static_cast<double>(i)).sum();
      if (i % 2 == 1) {
        loss = loss + (b * static_cast<double>(2 * i)).sum();
      }
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    require(is(zero::full_param(optimizer, a), {0.475581}), "a = 0.475581");
    require(is(zero::full_param(optimizer, b), {0.689524}), "b = 0.689524");
    require(zero::full_state(optimizer, a)["step"].item<float>() == 5.0F, "five steps");
    require(zero::full_state(optimizer, b)["step"].item<float>() == 3.0F, "three steps");
  });
}

TEST_CASE("clipping with tiny models, infinity norms and no gradient", "[engine]") {
  for (const int64_t ranks : {1, 2, 3}) {
    at_each_stage(ranks, [](int64_t stage, int64_t, const auto& group) {
      Free model;
      const at::Tensor w = model.add("w", torch::zeros({2}));
      zero::ZeroOptimizer optimizer(model, options_of(stage), zero::SGD{}, group);
      require(optimizer.clip_grad_norm_(1.0) == 0.0, "no gradient, norm 0");
      (w * torch::tensor({3.0, -4.0})).sum().backward();
      require(optimizer.grad_norm() == 5.0, "norm 5");
      const double infinity = std::numeric_limits<double>::infinity();
      require(optimizer.clip_grad_norm_(1.0, infinity) == 4.0, "maximum 4");
      require(is(zero::full_grad(optimizer, w), {0.75, -1.0}), "clipped");
      require(optimizer.grad_norm(1.0) == Approx(1.75), "1-norm of the clipped gradient");
    });
  }
}

TEST_CASE("odd parameters train like plain ones", "[engine]") {
  at_each_stage(3, [](int64_t stage, int64_t rank, const auto& group) {
    const auto build = [](Free& model) {
      torch::NoGradGuard no_grad;
      model.add("scalar", torch::tensor(2.0));
      model.add("empty", torch::zeros({4, 0}));
      model.add("transposed", torch::arange(12.0).view({3, 4}).t());
      model.add("strided", torch::arange(20.0).view({4, 5}).slice(1, 0, 3));
      model.add("frozen", torch::ones({5}), false);
      model.add("double", torch::ones({7}, torch::kDouble));
    };
    const auto loss = [](Free& model, double factor) {
      at::Tensor sum = torch::zeros({}, torch::kDouble);
      for (const auto& item : model.named_parameters()) {
        sum = sum + (item.value().to(torch::kDouble).square() * factor).sum();
      }
      return sum;
    };
    Free model;
    Free reference;
    build(model);
    build(reference);
    zero::ZeroOptimizer optimizer(model, options_of(stage), zero::Adam{.lr = 0.1}, group);
    torch::optim::Adam plain(reference.parameters(), torch::optim::AdamOptions(0.1));
    for (int64_t step = 0; step < 3; ++step) {
      loss(model, static_cast<double>(rank + 1)).backward();
      optimizer.step();
      optimizer.zero_grad();
      loss(reference, 2.0).backward();
      plain.step();
      plain.zero_grad();
    }
    optimizer.synchronize();
    require(close(weights_of(model), weights_of(reference), 1e-5, 1e-6), "equal weights");
    require(model.named_parameters()["empty"].sizes() == at::IntArrayRef({4, 0}), "shape (4, 0)");
    require(model.named_parameters()["scalar"].dim() == 0, "a scalar");
  });
}

TEST_CASE("tied parameters and modules called twice", "[engine]") {
  at_each_stage(2, [](int64_t stage, int64_t rank, const auto& group) {
    Free model;
    const at::Tensor w = model.add("w", torch::full({2}, 2.0));
    model.add("again", w);
    zero::ZeroOptimizer optimizer(model, options_of(stage), zero::SGD{}, group);
    require(optimizer.engine().parameter_count() == 1, "a tied parameter once");
    at::Tensor x = torch::full({2}, static_cast<double>(rank + 1));
    for (int64_t call = 0; call < 3; ++call) {
      x = x * w;
    }
    x.sum().backward();
    require(is(zero::full_grad(optimizer, w), {18.0, 18.0}), "18 from three uses");
  });
}

TEST_CASE("a sharded gradient and a parameter in flight answer for themselves", "[engine]") {
  for (const int64_t stage : {1, 2}) {
    run_ranks(2, [&](int64_t, const auto& group) {
      Free model;
      const at::Tensor w = model.add("w", torch::ones({1000}));
      zero::ZeroOptimizer optimizer(model, options_of(stage), zero::SGD{.lr = 1.0}, group);
      w.sum().backward();
      const std::string error = error_of([&] { w.grad().norm().item<float>(); });
      require(contains(error, "'w'") && contains(error, "clip_grad_norm_"), "a named error");
      optimizer.step();
      const std::string unread = error_of([&] { (void)w.data_ptr(); });
      require(
          contains(unread, "'w'") && contains(unread, "synchronize"), "a named error in flight");
      require(w.sum().item<float>() == 0.0F, "an operation waits");
      (void)w.data_ptr();
    });
  }
}

TEST_CASE("backward through weights that a step changed is torch's error", "[engine]") {
  at_each_stage(2, [](int64_t stage, int64_t, const auto& group) {
    Free model;
    const at::Tensor w = model.add("w", torch::ones({4}));
    zero::ZeroOptimizer optimizer(model, options_of(stage), zero::SGD{}, group);
    const at::Tensor loss = (w * w).sum();
    const at::Tensor stale = (w * w).sum();
    loss.backward();
    optimizer.step();
    require(contains(error_of([&] { stale.backward(); }), "inplace"), "torch's error");
  });
}

TEST_CASE("a raise on all ranks leaves a usable state", "[engine]") {
  at_each_stage(2, [](int64_t stage, int64_t, const auto& group) {
    Free model;
    const at::Tensor a = model.add("a", torch::ones({4}));
    const at::Tensor b = model.add("b", torch::ones({4}));
    zero::Options options = options_of(stage);
    options.bucket_bytes = options.first_bucket_bytes = 16;
    zero::ZeroOptimizer optimizer(model, options, zero::SGD{.lr = 1.0}, group);
    bool raises = true;
    a.register_hook([&](const at::Tensor& gradient) {
      if (raises) {
        throw std::runtime_error("boom");
      }
      return gradient;
    });
    require(contains(error_of([&] { (a + b).sum().backward(); }), "boom"), "boom");
    raises = false;
    optimizer.zero_grad();
    (a + b).sum().backward();
    require(is(zero::full_grad(optimizer, a), {1, 1, 1, 1}), "a clean gradient of a");
    require(is(zero::full_grad(optimizer, b), {1, 1, 1, 1}), "a clean gradient of b");
  });
}

TEST_CASE("stage 2 frees the whole gradient", "[engine]") {
  run_ranks(2, [](int64_t, const auto& group) {
    Free model;
    std::vector<at::Tensor> layers;
    for (int64_t i = 0; i < 10; ++i) {
      layers.push_back(model.add("layer" + std::to_string(i), torch::ones({1024})));
    }
    zero::Options options = options_of(2);
    options.bucket_bytes = options.first_bucket_bytes = 4096;
    zero::ZeroOptimizer optimizer(model, options, zero::SGD{}, group);
    at::Tensor x = torch::ones({1024});
    for (int64_t step = 0; step < 3; ++step) {
      at::Tensor y = x;
      for (const at::Tensor& layer : layers) {
        y = y * layer;
      }
      y.sum().backward();
      const auto report = optimizer.engine().report();
      require(report.held.gradients == 10 * 4096 / 2, "half of the gradient");
      require(report.held.buffers <= 4096, "one bucket's memory after backward");
      require(report.peak.buffers <= 3 * 4096, "a few open buckets inside backward");
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

TEST_CASE("other shapes or another order are named on every rank", "[engine]") {
  for (const bool order : {false, true}) {
    run_ranks(2, [&](int64_t rank, const auto& group) {
      Free model;
      if (order) {
        model.add(rank == 0 ? "a" : "b", torch::ones({2}));
        model.add(rank == 0 ? "b" : "a", torch::ones({2}));
      } else {
        model.add("a", torch::ones({rank == 0 ? 5 : 6}));
      }
      const std::string error =
          error_of([&] { zero::ZeroOptimizer(model, options_of(1), zero::SGD{}, group); });
      require(contains(error, "'a'") && contains(error, "rank 1"), "a named error, got " + error);
    });
  }
}

TEST_CASE("torch::optim classes run on shards", "[engine]") {
  at_each_stage(2, [](int64_t stage, int64_t rank, const auto& group) {
    auto model = make_gpt();
    auto reference = make_gpt();
    const auto rule = zero::elementwise<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3));
    zero::ZeroOptimizer optimizer(*model, options_of(stage), rule, group);
    torch::optim::RMSprop plain(reference->parameters(), torch::optim::RMSpropOptions(1e-3));
    for (int64_t step = 0; step < 3; ++step) {
      loss_of(*model, tokens_of(step, rank)).backward();
      optimizer.step();
      optimizer.zero_grad();
      const State gradients = mean_gradient(*reference, step, 2);
      const auto parameters = reference->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        parameters[i].mutable_grad() = gradients[i];
      }
      plain.step();
    }
    optimizer.synchronize();
    require(close(weights_of(*model), weights_of(*reference), 1e-4, 1e-5), "plain's weights");
  });
}

TEST_CASE("parameter groups have their own rules", "[engine]") {
  at_each_stage(2, [](int64_t stage, int64_t, const auto& group) {
    Free model;
    const at::Tensor fast = model.add("fast", torch::ones({3}));
    const at::Tensor slow = model.add("slow", torch::ones({3}));
    zero::ZeroOptimizer optimizer(
        model,
        options_of(stage),
        std::vector<zero::ParameterGroup>{
            {{fast}, zero::SGD{.lr = 1.0}}, {{slow}, zero::SGD{.lr = 0.1}}},
        group);
    (fast + slow).sum().backward();
    optimizer.step();
    require(is(fast.detach(), {0, 0, 0}) && is(slow.detach(), {0.9, 0.9, 0.9}), "own rates");
    optimizer.set_lr(0.5);
    optimizer.step();
    require(is(fast.detach(), {-0.5, -0.5, -0.5}) && is(slow.detach(), {0.4, 0.4, 0.4}), "0.5");
  });
}

TEST_CASE("moved parameters come back, other dtypes are refused by name", "[engine]") {
  at_each_stage(2, [](int64_t stage, int64_t, const auto& group) {
    Free model;
    at::Tensor w = model.add("w", torch::ones({3}));
    zero::ZeroOptimizer optimizer(model, options_of(stage), zero::SGD{.lr = 1.0}, group);
    w.set_data(torch::full({3}, 5.0));
    w.sum().backward();
    optimizer.step();
    require(is(w.detach(), {4, 4, 4}), "the moved value stepped");
    optimizer.zero_grad();
    optimizer.synchronize();
    w.set_data(torch::ones({3}, torch::kDouble));
    require(contains(error_of([&] { optimizer.step(); }), "'w' was moved"), "a named error");
  });
}
