#pragma once

// Steps that all ranks take or none: each says how its own went before any goes on.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <zero/optim/engine.h>

namespace zero::checkpoint {

class Together {
 public:
  // Null: one rank alone. `what` is for errors: "saving run/step-1000".
  Together(Engine* engine, std::string what);
  // Not over what the engine trains with, so on any thread.
  Together(std::shared_ptr<comm::Communicator> communicator, std::string what);

  int64_t rank() const {
    return rank_;
  }
  int64_t size() const {
    return size_;
  }
  // [collective] Runs `step` on this rank; every rank's result, in rank order. Where one
  // throws, it throws on all ranks: there its own error, elsewhere one that names it.
  std::vector<std::string> run(const std::function<std::string()>& step) const;
  // The same on rank 0 alone; its result.
  std::string run_first(const std::function<std::string()>& step) const;

 private:
  std::vector<std::string> exchange(const std::string& told) const;

  std::function<std::vector<at::Tensor>(const at::Tensor&)> exchange_; // none: one rank
  int64_t rank_ = 0;
  int64_t size_ = 1;
  std::string what_;
};

// [collective] Runs `fill` on all ranks, as Together::run(), with the values that an engine
// (null: there are none) holds, to be written to. Whatever came of it, they then go to the
// parameters and to the other ranks, so that what ranks hold stays equal.
void fill_together(
    Engine* engine,
    const Together& ranks,
    const std::function<void(const std::vector<StoredPart>&)>& fill);

} // namespace zero::checkpoint
