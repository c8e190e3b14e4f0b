#pragma once

// Training on fake devices (fake_device/): ranks are threads, each with a device, and the
// collectives are those of a backend that queues as NCCL does, or go through the host.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Context.h>

#include <zero/comm/device_backend.h>
#include <zero/memory/device_kernels.h>

#include "engine_cases.h"
#include "fake_device/fake_backend.h"
#include "fake_device/fake_device.h"
#include "fake_device/fake_kernels.h"

namespace zero::test {

// Makes fake devices known to the library, once a process.
inline void use_fake_devices() {
  static const bool known = [] {
    static const auto* kernels = new fake::FakeKernels(kernels::host_device_kernels());
    memory::register_device_kernels(c10::DeviceType::PrivateUse1, *kernels);
    comm::register_device_backend(
        c10::DeviceType::PrivateUse1,
        [](const auto& store, int64_t rank, int64_t size, double, c10::Device) {
          return fake::make_backend(store, rank, size, /*high_priority=*/true);
        });
    return true;
  }();
  static_cast<void>(known);
  fake::reset();
}

// Sums are taken in rank order, as on the CPU: equal bits can be asked for.
class Deterministic {
 public:
  Deterministic() {
    at::globalContext().setDeterministicAlgorithms(true, false);
  }
  Deterministic(const Deterministic&) = delete;
  Deterministic& operator=(const Deterministic&) = delete;
  ~Deterministic() {
    at::globalContext().setDeterministicAlgorithms(false, false);
  }
};

// A model that is made on its device: torch moves no C++ module to a PrivateUse1 one.
struct DeviceBlock : torch::nn::Module {
  DeviceBlock(int64_t dim, const at::TensorOptions& options) {
    scale = register_parameter("scale", at::empty({dim}, options));
    shift = register_parameter("shift", at::empty({dim}, options));
    up = register_parameter("up", at::empty({3 * dim, dim}, options));
    bias = register_parameter("bias", at::empty({3 * dim}, options));
    down = register_parameter("down", at::empty({dim, 3 * dim}, options));
  }
  at::Tensor forward(const at::Tensor& x) const {
    const at::Tensor normal = at::layer_norm(x, {x.size(-1)}, scale, shift);
    return x + at::linear(at::gelu(at::linear(normal, up, bias)), down);
  }
  at::Tensor scale, shift, up, bias, down;
};

struct DeviceModel : torch::nn::Module {
  DeviceModel(uint64_t seed, c10::Device device) {
    constexpr int64_t kDim = 12;
    const at::TensorOptions options = at::TensorOptions().device(device);
    tokens = register_parameter("tokens", at::empty({256, kDim}, options));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t layer = 0; layer < 3; ++layer) {
      blocks->push_back(std::make_shared<DeviceBlock>(kDim, options));
    }
    unused = register_parameter("unused", at::empty({5}, options));
    torch::NoGradGuard no_grad;
    auto generator = seeded(seed);
    for (const at::Tensor& parameter : parameters()) {
      parameter.copy_(at::empty(parameter.sizes()).normal_(0.0, 0.2, generator));
    }
  }
  // The head is tied to the embedding.
  at::Tensor forward(const at::Tensor& input) const {
    at::Tensor x = at::embedding(tokens, input);
    for (const auto& block : *blocks) {
      x = block->as<DeviceBlock>()->forward(x);
    }
    return at::linear(x, tokens);
  }
  at::Tensor tokens, unused;
  torch::nn::ModuleList blocks{nullptr};
};

inline at::Tensor loss_of(const DeviceModel& model, const at::Tensor& tokens) {
  const at::Tensor logits = model.forward(tokens.slice(1, 0, -1));
  return at::cross_entropy_loss(logits.flatten(0, 1), tokens.slice(1, 1).flatten());
}

struct DeviceRun {
  State weights; // on the CPU
  std::vector<double> norms;
  Engine::Report report;
  std::vector<int64_t> peaks; // bytes on the device, by step
};

struct DeviceTraining {
  Options options;
  Rule rule = AdamW{.lr = 1e-2};
  int64_t ranks = 2;
  int64_t steps = 6;
  bool on_device = true;
  bool clips = true;
  // Called on each rank after backward, before the step.
  std::function<void(int64_t rank, int64_t step, ZeroOptimizer&)> before_step = {};
};

inline State on_cpu(const State& state) {
  State copies;
  for (const at::Tensor& tensor : state) {
    copies.push_back(tensor.cpu());
  }
  return copies;
}

inline DeviceRun
train_rank(const DeviceTraining& training, int64_t rank, const Group& group, bool synchronizes) {
  const c10::Device device =
      training.on_device ? fake::device(static_cast<c10::DeviceIndex>(rank)) : at::kCPU;
  DeviceRun run;
  auto model = std::make_shared<DeviceModel>(rank + 1, device); // rank 0's weights must win
  ZeroOptimizer optimizer(*model, training.options, training.rule, group);
  std::vector<GradNorm> norms;
  std::vector<at::Tensor> batches;
  for (int64_t step = 0; step < training.steps; ++step) {
    batches.push_back(tokens_of(step, rank).to(device));
  }
  for (int64_t step = 0; step < training.steps; ++step) {
    // Only a first step may wait: the launch order is agreed, buffers are made.
    std::unique_ptr<fake::NoSynchronization> never;
    if (training.on_device && !synchronizes && step > 0) {
      never = std::make_unique<fake::NoSynchronization>(device.index());
    }
    if (training.on_device) {
      fake::reset_peak(device.index());
    }
    loss_of(*model, batches[step]).backward();
    if (training.before_step) {
      training.before_step(rank, step, optimizer);
    }
    if (training.clips) {
      norms.push_back(optimizer.clip_grad_norm_(0.5));
    }
    optimizer.step();
    optimizer.zero_grad();
    if (training.on_device) {
      run.peaks.push_back(fake::memory(device.index()).peak);
    }
  }
  optimizer.synchronize();
  optimizer.gathered([&] { run.weights = on_cpu(weights_of(*model)); });
  run.norms.assign(norms.begin(), norms.end());
  run.report = optimizer.engine().report();
  return run;
}

inline std::vector<DeviceRun> train_all(const DeviceTraining& training, bool synchronizes = false) {
  std::vector<DeviceRun> runs(training.ranks);
  run_ranks(training.ranks, [&](int64_t rank, const auto& group) {
    runs[rank] = train_rank(training, rank, group, synchronizes);
  });
  fake::check();
  return runs;
}

} // namespace zero::test
