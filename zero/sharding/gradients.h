#pragma once

// GradientManager: the life of every gradient. Backward accumulates into flat
// buckets; a bucket is reduced as soon as it is complete, in an order that all
// ranks share; at the end of backward everything is reduced and `.grad` answers
// for itself. The autograd hooks call it on the thread that runs backward, the
// engine from the user's thread. See [Note: gradient states] in docs/design.md.

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <zero/sharding/bucket_stepper.h>
#include <zero/sharding/gradient_storage.h>
#include <zero/sharding/local_sums.h>

namespace zero::sharding {

enum class GradientState : uint8_t {
  none, // no gradient, as `.grad` is None
  local, // this rank's contribution is in the open bucket
  reduced, // the sum over ranks is in the storage (or on its way there)
};

class GradientManager {
 public:
  // `whole`: `.grad` is the whole reduced gradient (stage 0), not a stand-in.
  GradientManager(
      const GradientContext& context,
      std::unique_ptr<GradientStorage> storage,
      bool whole);

  // The table grew.
  void grow();
  // Called when a bucket of parameters that were frozen became trainable, because a
  // backward reached one of them on some rank.
  void on_unfrozen(std::function<void(int64_t bucket)> notice);
  // By parameter: those that are to be trainable become so, without what a backward may
  // have given them here. The same on all ranks; no communication.
  void catch_up(const std::vector<bool>& trainable);
  void set_stand_ins(std::vector<at::Tensor> stand_ins);
  // From now on each bucket is stepped once it is reduced (gradients_step.cpp).
  void step_in_backward(std::unique_ptr<BucketStepper> stepper);
  // Whether a backward that stepped some buckets did not come to its end.
  bool interrupted() const;
  // One did not, on some rank: until mend(), require_untorn() throws, as backward does.
  void tear();
  void mend();
  void require_untorn() const;
  void set_sync(bool sync);
  bool sync() const;

  // From the hooks. before_accumulate gives the number of the backward that it
  // opened, or 0 when one is open; its end is reported by end_backward, or its
  // loss by abandon, with that number.
  int64_t before_accumulate(int64_t index);
  // Gives the bucket whose last gradient of this backward this was, or -1.
  int64_t after_accumulate(int64_t index);
  // Stage 3: the order in which buckets are launched, until a backward has shown
  // its own.
  void expect_order(const std::vector<int64_t>& order);
  bool order_known() const {
    return order_adapted_;
  }
  void end_backward(int64_t backward);
  void abandon(int64_t backward) noexcept;
  // No backward is open, but for one that was lost.
  bool idle() const;
  // Nothing is in the middle of anything: gradients are as the last backward left
  // them.
  bool intact() const;
  // After a failure of communication: no parameter has a gradient of ours.
  void discard();

  // [collective] Reduces what is still local; waits for all reductions. Not
  // inside backward.
  void flush();
  void zero(bool set_to_none);
  // At the end of the manager's life: `.grad` that only it could answer for
  // becomes None.
  void forget();
  // Takes in gradients that the user assigned to `.grad`.
  void import_assigned();

  bool has_gradient(int64_t index) const;
  at::Tensor reduced(int64_t bucket);
  // Before a step: of the buckets that have a gradient, the last first, as step() takes them.
  void prepare_step();
  // The reduced gradient where the step runs: on a device, or, with offload, on the host,
  // which waits for it.
  at::Tensor stepped_by(int64_t bucket);
  // What reduced() gave goes to a user, who may write to it.
  void lent(int64_t bucket);
  // What a reduction is rounded to.
  c10::ScalarType reduced_dtype(int64_t bucket) const {
    return context_.reduced_dtype(bucket);
  }
  // To be called after what reduced() gave was written to.
  void reduced_changed(int64_t bucket);
  layout::Range reduced_range(int64_t bucket) const;
  void count_step() {
    ++steps_;
    stepped_ = false;
  }
  BucketReducer& reducer() const {
    return *context_.reducer;
  }

  // Of joins, where a rank may have nothing to contribute (gradients_join.cpp).
  // What reductions are divided by from now on, and whose order of launches all adopt.
  void set_reduction(double divisor, int64_t source);
  double divisor() const {
    return context_.reducer->divisor();
  }
  // Whether the backward that is open reduces.
  bool reduces() const;
  // Whether this rank has accumulated something that was not reduced. Throws what made
  // gradients unusable.
  bool unreduced();
  // The order of launches; empty once the ranks have agreed on it.
  std::vector<int64_t> launch_order() const;
  // [collective] Reduces what is local, and zeros where nothing is. `order`: as
  // launch_order() gives it on the rank that is followed.
  void reduce_all(const std::vector<int64_t>& order);
  // By parameter: whether it has a gradient.
  std::vector<uint8_t> presence() const;
  // Reduced gradients that the others let go of are let go of.
  void follow_presence(const std::vector<uint8_t>& theirs);
  // [collective, stage 0] Rank `root`'s gradients, of the parameters that have one there.
  void share(int64_t root, const std::vector<uint8_t>& theirs);

  int64_t steps() const {
    return steps_;
  }

 private:
  struct Slot {
    GradientState state = GradientState::none; // of one that is frozen: none or local
    bool kept = false; // reduced elements are put aside, to be added to
    bool seen = false; // accumulated in this backward
    bool contributed = false; // to a reduction in this backward
    at::Tensor alias; // over the slot in the open bucket
    memory::SlabView view; // of the alias
    at::Tensor stand_in; // what `.grad` is once reduced
    std::string reduced_message; // of the view, once reduced
  };
  struct Bucket {
    int64_t pending = 0; // parameters not seen yet in this backward
    bool launched = false;
    bool late = false; // got a gradient after it was launched
    bool deferred = false; // launched at the end of backward only
    comm::WorkPtr work;
    at::Tensor usage; // of stepper_: by rank and parameter, whether it has a gradient
    comm::WorkPtr usage_work;
    bool stepped = false; // in this backward
  };

  at::Tensor& grad_of(int64_t index) const;
  void make_slot(int64_t index);
  void extend();
  void begin_backward();
  void take_slot(int64_t index);
  void fill_slot(int64_t index);
  const at::Tensor& open(int64_t bucket);
  void put_aside(int64_t bucket, int64_t index);
  void launch_complete();
  void launch(int64_t bucket);
  void seal(int64_t bucket, bool* add);
  void reopen(int64_t bucket);
  void wait_for(int64_t bucket);
  void wait_oldest();
  void make_room();
  void settle_in_flight();
  int64_t max_in_flight() const;
  void begin_stepping(int64_t index);
  void send_usage(int64_t bucket);
  void step_reduced(int64_t bucket);
  void step_bucket(int64_t bucket, const std::vector<char>& used);
  void publish_stepped(size_t left);
  void step_all(const std::vector<bool>& used);
  void refuse_late(int64_t index) const;
  void show_reduced(int64_t index);
  void finish_reduction();
  // Of buckets that are stepped in backward.
  static constexpr int64_t kMaxLaunched = 2;
  // What the ranks tell each other at the end of a backward.
  struct Agreement {
    std::vector<bool> used; // by parameter: on any rank
    std::vector<bool> late; // by bucket: on any rank
  };
  Agreement agree();
  void reduce_late(const std::vector<bool>& late);
  std::vector<int64_t> unfreeze(const std::vector<bool>& wanted);
  void reduce_unfrozen(const std::vector<bool>& used);
  void adopt_order(const std::vector<int64_t>& order);
  void reset_backward();
  void reset_order();
  bool lost_backward() const; // one is open that ended in an exception
  void recover_if_abandoned();

  const GradientContext context_;
  ParameterTable& table_;
  const std::shared_ptr<comm::Communicator> communicator_;
  const std::unique_ptr<GradientStorage> storage_;
  const bool whole_;
  std::function<void(int64_t bucket)> on_unfrozen_;
  std::unique_ptr<BucketStepper> stepper_;

  mutable std::mutex mutex_;
  LocalSums sums_;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::vector<int64_t> order_; // in which buckets are launched
  std::vector<int64_t> completed_; // order in which they became complete here
  std::deque<int64_t> in_flight_;
  size_t next_ = 0; // position in order_
  bool order_adapted_ = false;
  bool sync_ = true;
  bool active_ = false;
  bool active_sync_ = true;
  int64_t backward_ = 0; // number of the one that is open, or was last
  std::atomic<int64_t> abandoned_ = 0; // number of one that was lost
  std::exception_ptr lost_; // why gradients are not to be used, until they are zeroed
  int64_t steps_ = 0;
  bool eager_ = false; // this backward steps each bucket once it is reduced
  bool stepped_ = false; // some bucket was, since the last step
  bool torn_ = false;
  std::deque<int64_t> launched_; // eager: not handed on yet, in order of their launch
  int64_t order_source_ = 0; // the rank whose order is adopted
};

} // namespace zero::sharding
