#pragma once

// Trainings in which everything happens that changes gradients and weights between steps:
// what offloaded ones are compared with is the same on the CPU.

#include <limits>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "device_cases.h"

namespace zero::test {

inline zero::Options offload_options(int64_t stage, bool on_device, const std::string& offload) {
  zero::Options options{
      .stage = stage, .bucket_bytes = 4096, .first_bucket_bytes = 2048, .timeout = 60.0};
  options.min_unit_numel = 0;
  if (!on_device) {
    options.transport = "host";
  } else if (!offload.empty()) {
    options.offload = offload;
  }
  return options;
}

// What a stage can offload.
inline std::vector<std::string> offloads_of(int64_t stage) {
  return stage == 3 ? std::vector<std::string>{"optimizer", "parameters"}
                    : std::vector<std::string>{"optimizer"};
}

// A rank's device, which its thread's current one becomes.
inline c10::Device device_of(int64_t rank, bool on_device) {
  if (!on_device) {
    return at::kCPU;
  }
  const c10::Device device = fake::device(static_cast<c10::DeviceIndex>(rank));
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  return device;
}

// Whole values and state, on the CPU.
inline State contents_of(ZeroOptimizer& optimizer, torch::nn::Module& model) {
  State values;
  for (const at::Tensor& parameter : model.parameters()) {
    values.push_back(zero::full_param(optimizer, parameter).cpu());
    for (const auto& [name, value] : zero::full_state(optimizer, parameter)) {
      values.push_back(value.cpu());
    }
  }
  return values;
}

struct Lived {
  State contents;
  std::vector<double> norms;
  int64_t steps_left_out = 0;
};

// A model whose parameters are in two groups; one of the second block's is frozen at first.
class Life {
 public:
  Life(zero::Options options, int64_t rank, const Group& group, bool on_device)
      : rank_(rank), device_(device_of(rank, on_device)), model_(rank + 1, device_) {
    options.on_nonfinite = "skip";
    block(1).up.set_requires_grad(false);
    std::vector<ParameterGroup> groups{
        {{}, AdamW{.lr = 1e-2}}, {{}, SGD{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.1}}};
    size_t next = 0;
    for (const at::Tensor& parameter : model_.parameters()) {
      if (parameter.requires_grad()) {
        groups[next++ % 2].parameters.push_back(parameter);
      }
    }
    optimizer_ = std::make_unique<ZeroOptimizer>(model_, options, groups, group);
  }

  Lived live() {
    Lived lived;
    for (int64_t step = 0; step < 8; ++step) {
      block(0).bias.set_requires_grad(step != 2);
      if (step == 3) {
        block(1).up.set_requires_grad(true);
      }
      backward(step);
      change_gradients(step);
      if (step % 2 == 1) {
        lived.norms.push_back(optimizer_->clip_grad_norm_(0.3));
      }
      optimizer_->step();
      optimizer_->zero_grad(/*set_to_none=*/step != 5);
      change_weights(step);
    }
    lived.contents = contents_of(*optimizer_, model_);
    lived.steps_left_out = optimizer_->engine().report().nonfinite_steps;
    return lived;
  }

 private:
  DeviceBlock& block(size_t index) {
    return *model_.blocks[index]->as<DeviceBlock>();
  }

  void run(int64_t step, int64_t micro) {
    at::Tensor loss = loss_of(model_, tokens_of(step, rank_, micro).to(device_));
    if (step == 4 && rank_ == 0) {
      loss = loss * std::numeric_limits<double>::infinity();
    }
    loss.backward();
  }

  void backward(int64_t step) {
    if (step % 3 == 0) {
      const auto no_sync = optimizer_->no_sync();
      run(step, 0);
    }
    run(step, 1);
    if (step % 3 == 1) {
      run(step, 2);
    }
  }

  void change_gradients(int64_t step) {
    const at::NoGradGuard no_grad;
    if (step == 1) {
      optimizer_->clip_grad_value_(0.01);
    } else if (step == 2) {
      optimizer_->divide_grad_(2.0);
    } else if (step == 3) {
      const int64_t index = optimizer_->engine().index_of(model_.tokens);
      at::Tensor gradient = optimizer_->engine().shard_gradient(index);
      gradient.mul_(0.5);
    } else if (step == 6) {
      model_.unused.mutable_grad() = at::ones_like(model_.unused);
    } else if (step == 7 && optimizer_->engine().options().stage == 0) {
      model_.tokens.mutable_grad().mul_(0.5);
    }
  }

  void change_weights(int64_t step) {
    const at::NoGradGuard no_grad;
    const bool whole = optimizer_->engine().options().stage < 3;
    if (step == 1 && whole) {
      block(2).down.mul_(0.75);
    } else if (step == 1) {
      optimizer_->gathered([&] { block(2).down.mul_(0.75); }, /*writeback=*/true);
    } else if (step == 3 && whole) {
      block(0).up.set_data(block(0).up.detach() * 1.25);
    }
  }

  const int64_t rank_;
  const c10::Device device_;
  DeviceModel model_;
  std::unique_ptr<ZeroOptimizer> optimizer_;
};

// Of rank 0, after all ranks were found to have the same.
inline Lived live(const zero::Options& options, int64_t ranks, bool on_device) {
  std::vector<Lived> lived(ranks);
  run_ranks(ranks, [&](int64_t rank, const auto& group) {
    lived[rank] = Life(options, rank, group, on_device).live();
  });
  fake::check();
  for (const Lived& other : lived) {
    require(equal(other.contents, lived.front().contents), "equal values on all ranks");
    require(other.norms == lived.front().norms, "equal norms on all ranks");
  }
  return lived.front();
}

} // namespace zero::test
