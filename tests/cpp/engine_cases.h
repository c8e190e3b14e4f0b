#pragma once

// What the engine's tests share: a small GPT, its data, and what one process
// computes for all ranks with nothing but ATen.

#include <torch/torch.h>

#include <zero/zero.h>

#include "examples/gpt.h"
#include "ranks.h"

namespace zero::test {

using State = std::vector<at::Tensor>;

inline std::shared_ptr<GPT> make_gpt(uint64_t seed = 1) {
  auto model = std::make_shared<GPT>(/*layers=*/2, /*dim=*/12, /*heads=*/2, /*context=*/8);
  initialise(*model, seed);
  return model;
}

inline at::Tensor tokens_of(int64_t step, int64_t rank, int64_t micro = 0) {
  auto generator = seeded(1000 * step + 10 * rank + micro + 7);
  return torch::randint(0, 256, {3, 9}, generator, torch::kLong);
}

inline at::Tensor loss_of(GPT& model, const at::Tensor& tokens) {
  const at::Tensor logits = model.forward(tokens.slice(1, 0, -1));
  return torch::cross_entropy_loss(logits.flatten(0, 1), tokens.slice(1, 1).flatten());
}

inline State weights_of(torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  State state;
  for (const at::Tensor& parameter : module.parameters()) {
    state.push_back(parameter.detach().clone());
  }
  return state;
}

inline bool equal(const State& a, const State& b) {
  if (a.size() != b.size()) {
    return false;
  }
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].sizes() != b[i].sizes() || !torch::equal(a[i], b[i])) {
      return false;
    }
  }
  return true;
}

inline bool close(const State& a, const State& b, double rtol, double atol) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!torch::allclose(a[i], b[i], rtol, atol)) {
      return false;
    }
  }
  return a.size() == b.size();
}

// A rank's thread reports by throwing.
inline void require(bool condition, const std::string& what) {
  if (!condition) {
    throw std::runtime_error("expected " + what);
  }
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The mean gradient over ranks as one process computes it: each rank's own, summed
// in rank order, divided by their number.
inline State mean_gradient(GPT& model, int64_t step, int64_t ranks) {
  State sum;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    model.zero_grad();
    loss_of(model, tokens_of(step, rank)).backward();
    State own;
    for (const at::Tensor& parameter : model.parameters()) {
      own.push_back(parameter.grad().clone());
    }
    for (size_t i = 0; i < own.size(); ++i) {
      if (rank == 0) {
        sum.push_back(own[i]);
      } else {
        sum[i] = sum[i] + own[i];
      }
    }
  }
  for (at::Tensor& gradient : sum) {
    gradient = gradient / static_cast<double>(ranks);
  }
  return sum;
}

} // namespace zero::test
