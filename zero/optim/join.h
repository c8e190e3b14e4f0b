#pragma once

// Uneven data: ranks run out of batches at different steps. Around the training loop:
//   zero::join(optimizer, [&] {
//     for (const Batch& batch : batches_of_this_rank) { ... backward, step, zero_grad ... }
//   });
// A rank whose loop has ended takes part in what the others do, with no gradient of its
// own and with their hyper-parameters, until all have ended; then weights, optimizer
// state and step counts are equal on all ranks. Parameters and `.grad` are not written by
// hand inside, and LossScaler is refused. State dicts and other things that need all
// ranks raise once a rank has ended.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <zero/api.h>

namespace zero {

class Engine;
class ZeroOptimizer;

struct JoinOptions {
  // What gradients are divided by, where Options::average is true: "active", the number
  // of ranks that contribute to the reduction, or "all", the number of ranks.
  std::string average_over = "active";
};

// [collective] Runs `body` on this thread. Throws what it throws, and then on all other
// ranks an error that names this one. Throws c10::ValueError for other options and for
// ranks that give different ones, and when this thread has another join open: give one
// join all optimizers that are stepped in its body.
ZERO_API void
join(ZeroOptimizer& optimizer, const std::function<void()>& body, const JoinOptions& options = {});
ZERO_API void join(
    const std::vector<ZeroOptimizer*>& optimizers,
    const std::function<void()>& body,
    const JoinOptions& options = {});

// The same with a scope. The optimizers must outlive it.
class ZERO_API Join {
 public:
  explicit Join(ZeroOptimizer& optimizer, const JoinOptions& options = {}); // [collective]
  explicit Join(std::vector<ZeroOptimizer*> optimizers, const JoinOptions& options = {});
  // Without finish(): this rank was left by an exception, and all others throw.
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  // [collective] This rank's data has ended: returns when it has on all ranks.
  void finish();
  // Instead: tells the others why this rank doesn't go on.
  void fail(const std::string& why) noexcept;

 private:
  std::vector<ZeroOptimizer*> optimizers_;
  bool open_ = false;
};

} // namespace zero
