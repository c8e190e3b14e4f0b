#pragma once

// What the tests of saving and loading share: how models are sharded and trained.

#include "engine_cases.h"

namespace zero::test {

inline zero::Options options_of(int64_t stage) {
  zero::Options options;
  options.stage = stage;
  options.min_unit_numel = 0;
  options.bucket_bytes = 4096;
  options.timeout = 20.0;
  return options;
}

inline void train(zero::ZeroOptimizer& optimizer, GPT& model, int64_t rank, int64_t step) {
  loss_of(model, tokens_of(step, rank)).backward();
  optimizer.step();
  optimizer.zero_grad();
}

} // namespace zero::test
