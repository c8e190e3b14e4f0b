#pragma once

// Steps that all ranks take or none: each says how its own went before any goes on.

#include <functional>
#include <string>
#include <vector>

#include <zero/optim/engine.h>

namespace zero::checkpoint {

class Together {
 public:
  // `engine` null: one rank alone. `what` is for errors: "saving run/step-1000".
  Together(Engine* engine, std::string what) : engine_(engine), what_(std::move(what)) {}

  int64_t rank() const {
    return engine_ == nullptr ? 0 : engine_->rank();
  }
  int64_t size() const {
    return engine_ == nullptr ? 1 : engine_->world_size();
  }
  // [collective] Runs `step` on this rank; every rank's result, in rank order. Where one
  // throws, it throws on all ranks: there its own error, elsewhere one that names it.
  std::vector<std::string> run(const std::function<std::string()>& step) const;
  // The same on rank 0 alone; its result.
  std::string run_first(const std::function<std::string()>& step) const;

 private:
  Engine* const engine_;
  const std::string what_;
};

} // namespace zero::checkpoint
