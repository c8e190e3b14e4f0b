// Joins of ranks whose data has not ended, and their beginning and end.

#include <zero/optim/engine_join.h>

#include <thread>
#include <utility>

#include <ATen/ops/full.h>

#include <zero/comm/blocking.h>
#include <zero/comm/error_text.h>

namespace zero {

using optim::JoinAction;
using optim::JoinMessage;

namespace {

const char* name_of(bool over_active) {
  return over_active ? "active" : "all";
}

void check(const Options& options, const comm::Communicator& communicator) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !options.step_in_backward,
      "[zero.optim] zero.join with step_in_backward=True is not built: a rank without a batch "
      "can't "
      "follow steps inside a backward; leave one of them out");
  TORCH_CHECK_NOT_IMPLEMENTED(
      communicator.shard_size() == communicator.size(),
      "[zero.optim] zero.join with hybrid sharding is not built; leave one of them out");
}

} // namespace

Engine::JoinState::JoinState(Impl& impl, bool over_active)
    : impl_(impl), over_active_(over_active), divisor_before_(impl.gradients.divisor()) {
  check(impl.options, *impl.communicator);
  impl_.recover_if_failed();
  const at::Tensor own = at::full({1}, over_active ? 1 : 0, at::kByte);
  const auto all = impl_.communicator->exchange(own, {"the beginning of zero.join", 0, 0, false});
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const bool theirs = *all[rank].const_data_ptr<uint8_t>() != 0;
    TORCH_CHECK_VALUE(
        theirs == over_active,
        "[zero.optim] expected the same average_over on all ranks of zero.join, got \"",
        name_of(theirs),
        "\" on rank ",
        rank,
        " and \"",
        name_of(over_active),
        "\" on rank ",
        impl_.communicator->rank());
  }
  if (impl_.parameters) {
    impl_.parameters->on_gather([this](int64_t bucket, int64_t step, bool training) {
      announce_gather(bucket, step, training);
    });
  }
}

Engine::JoinState::~JoinState() {
  if (impl_.parameters) {
    impl_.parameters->on_gather(nullptr);
    impl_.parameters->discard(); // what this rank learned in its own forwards, others did not
  }
  impl_.gradients.set_reduction(divisor_before_, 0);
  impl_.forward_abandoned = false;
}

JoinMessage Engine::JoinState::say(JoinMessage own) {
  own.actions = actions_;
  own.zeros = zeros_;
  own.local = impl_.gradients.unreduced();
  own.order = impl_.gradients.launch_order();
  own.presence = impl_.gradients.presence();
  return own;
}

void Engine::JoinState::meet(const JoinMessage& own) {
  try {
    round_ = optim::meet(*impl_.communicator, own);
  } catch (...) {
    broken_ = true;
    throw;
  }
  const int64_t ranks = over_active_ ? round_.contributors() : impl_.communicator->size();
  impl_.gradients.set_reduction(
      impl_.options.average ? static_cast<double>(ranks) : divisor_before_, round_.source);
}

// What a rank accumulated before its data ended counts, too.
void Engine::JoinState::reduce_unreduced() {
  if (round_.any_local()) {
    impl_.gradients.reduce_all(round_.followed().order);
  }
}

void Engine::JoinState::announce(JoinMessage own) {
  if (shadowing_) {
    return;
  }
  if (own.action == JoinAction::inspect) {
    if (impl_.options.stage == 0 && !impl_.gradients.unreduced()) {
      round_ = {}; // nothing to share
      return;
    }
    own.action = JoinAction::other;
  }
  ++actions_;
  meet(say(std::move(own)));
  const JoinMessage& done = round_.messages[impl_.communicator->rank()];
  if (done.action == JoinAction::backward || done.action == JoinAction::zero_grad ||
      done.action == JoinAction::buffers) {
    return;
  }
  reduce_unreduced();
  if (done.action != JoinAction::other || round_.all_active()) {
    return;
  }
  int64_t gone = 0;
  while (round_.messages[gone].active()) {
    ++gone;
  }
  TORCH_CHECK(
      false,
      "[zero.optim] ",
      done.text,
      " inside zero.join can't be done once a rank has run out of data, and rank ",
      gone,
      " has (seen on rank ",
      impl_.communicator->rank(),
      " of ",
      impl_.communicator->size(),
      "); do it after the join");
}

void Engine::JoinState::share() {
  if (impl_.options.stage == 0 && !round_.active.empty() && !round_.all_active()) {
    impl_.gradients.share(round_.source, round_.followed().presence);
  }
}

void Engine::JoinState::zero_grad(bool set_to_none) {
  if (shadowing_) {
    return;
  }
  ++zeros_;
  if (!set_to_none) {
    announce({.action = JoinAction::zero_grad});
  }
}

void Engine::JoinState::announce_gather(int64_t bucket, int64_t step, bool training) {
  if (shadowing_) {
    return;
  }
  JoinMessage own{
      .action = JoinAction::gather,
      .arguments = {static_cast<double>(bucket), static_cast<double>(step), training ? 1.0 : 0.0}};
  own.actions = impl_.gradients.steps();
  optim::meet(*impl_.gathers, own);
}

// At most a timeout long, since a rank may be in another operation: that is an error
// there, which names both.
void Engine::JoinState::tell(comm::Communicator& communicator, const std::string& why)
    const noexcept {
  try {
    if (communicator.recovers()) {
      communicator.abort("its zero.join was left by an exception: " + why);
    } else {
      optim::meet(communicator, {.action = JoinAction::raised, .text = why});
    }
  } catch (...) { // NOLINT(bugprone-empty-catch): the others have their own error
  }
}

void Engine::JoinState::fail(const std::string& why) noexcept {
  const comm::BlockingScope blocking;
  std::thread other;
  if (impl_.gathers != impl_.communicator && (!shadowing_ || impl_.gathers->recovers())) {
    other = std::thread([&] { tell(*impl_.gathers, why); });
  }
  if (!broken_) {
    tell(*impl_.communicator, why);
  }
  if (other.joinable()) {
    other.join();
  }
}

void Engine::Impl::announce(const char* action) {
  if (join) {
    join->announce({.action = JoinAction::other, .text = action});
  }
}

void Engine::Impl::refuse_scaler() const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !join,
      "[zero.optim] a loss scaler inside zero.join is not built: the scale of a rank whose data "
      "has "
      "ended would stand still; train without one, in bfloat16 or float32");
}

void Engine::begin_join(bool over_active) {
  TORCH_CHECK(!impl_->join, "[zero.optim] expected no open zero.join of this optimizer, got one");
  impl_->join = std::make_unique<JoinState>(*impl_, over_active);
}

bool Engine::joining() const {
  return impl_->join != nullptr;
}

void Engine::shadow_join(const std::function<void(const std::string& hyperparameters)>& step) {
  TORCH_CHECK(impl_->join, "[zero.optim] expected begin_join() before shadow_join()");
  const std::unique_ptr<JoinState>& join = impl_->join;
  try {
    join->shadow(*this, step);
  } catch (...) {
    impl_->join.reset();
    throw;
  }
  impl_->join.reset();
}

void Engine::fail_join(const std::string& why) noexcept {
  if (impl_->join) {
    impl_->join->fail(why);
    impl_->join.reset();
  }
}

} // namespace zero
