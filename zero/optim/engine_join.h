#pragma once

// Engine::JoinState: the ranks of one engine while a join is open. A rank whose data
// has not ended announces each thing that needs the others; one whose data has ended
// answers and does the same without a batch. At stage 3 gathers go on beside that, over
// their own communicator, served by a thread of their own. See [Note: joins] in
// docs/design.md.

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include <zero/optim/engine_impl.h>

namespace zero {

class Engine::JoinState {
 public:
  using ForeignStep = std::function<void(const std::string& hyperparameters)>;

  // [collective] Throws on all ranks when they don't ask for the same.
  JoinState(Impl& impl, bool over_active);
  ~JoinState();
  JoinState(const JoinState&) = delete;
  JoinState& operator=(const JoinState&) = delete;

  // [collective] Before this rank does something with the others. Reduces what was
  // accumulated on any rank, except before a backward, which does that itself.
  void announce(optim::JoinMessage own);
  // [collective] Stage 0, after announce(): gradients are the first active rank's, whatever
  // it did to them.
  void share();
  void zero_grad(bool set_to_none);
  // Whose buffers the others follow.
  int64_t source() const {
    return round_.source;
  }
  // All ranks know already that it can't go on.
  bool broken() const {
    return broken_;
  }

  // As Engine's.
  void shadow(Engine& engine, const ForeignStep& step);
  void fail(const std::string& why) noexcept;

 private:
  void announce_gather(int64_t bucket, int64_t step, bool training);
  optim::JoinMessage say(optim::JoinMessage own);
  void meet(const optim::JoinMessage& own);
  void reduce_unreduced();
  bool serve(Engine& engine, const ForeignStep& step);
  void follow();
  void perform(Engine& engine, const ForeignStep& step);
  void require_gradients() const;
  void serve_gathers() noexcept;
  bool serve_gather();
  void tell(comm::Communicator& communicator, const std::string& why) const noexcept;

  Impl& impl_;
  const bool over_active_;
  const double divisor_before_;
  bool shadowing_ = false;
  bool broken_ = false; // all ranks know that it is over
  int64_t actions_ = 0;
  int64_t zeros_ = 0;
  optim::JoinRound round_; // the last one

  std::mutex mutex_; // guards the rest, which the gathers' thread shares
  std::condition_variable changed_;
  int64_t steps_done_ = 0;
  bool over_ = false;
  std::exception_ptr gather_error_;
};

} // namespace zero
