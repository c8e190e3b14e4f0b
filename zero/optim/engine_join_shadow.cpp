// Joins of a rank whose data has ended: it does what the others announce.

#include <zero/optim/engine_join.h>

#include <thread>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <zero/comm/blocking.h>
#include <zero/comm/error_text.h>

namespace zero {

using optim::JoinAction;
using optim::JoinMessage;

void Engine::JoinState::shadow(Engine& engine, const ForeignStep& step) {
  shadowing_ = true;
  const comm::BlockingScope blocking;
  steps_done_ = impl_.gradients.steps();
  std::thread gathers;
  if (impl_.parameters && impl_.communicator->size() > 1) {
    gathers = std::thread([this] { serve_gathers(); });
  }
  std::exception_ptr error;
  try {
    while (serve(engine, step)) {
      const std::lock_guard lock(mutex_);
      steps_done_ = impl_.gradients.steps();
      changed_.notify_all();
    }
  } catch (...) {
    error = std::current_exception();
    const std::lock_guard lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }
  if (error) {
    fail(comm::text_of(error));
  }
  if (gathers.joinable()) {
    gathers.join();
  }
  if (gather_error_ && !broken_) {
    std::rethrow_exception(gather_error_);
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

// False: all ranks' data has ended.
bool Engine::JoinState::serve(Engine& engine, const ForeignStep& step) {
  meet(say({}));
  follow();
  if (round_.active.empty()) {
    reduce_unreduced();
    return false;
  }
  switch (round_.followed().action) {
  case JoinAction::backward:
    impl_.gradients.reduce_all(round_.followed().order);
    break;
  case JoinAction::zero_grad:
    impl_.gradients.zero(/*set_to_none=*/false);
    break;
  case JoinAction::buffers:
    impl_.sync_buffers();
    break;
  case JoinAction::other:
    reduce_unreduced();
    break;
  default:
    reduce_unreduced();
    require_gradients();
    perform(engine, step);
  }
  return true;
}

void Engine::JoinState::follow() {
  const JoinMessage& followed = round_.followed();
  if (followed.zeros > zeros_) {
    impl_.gradients.zero(/*set_to_none=*/true);
    zeros_ = followed.zeros;
  }
  impl_.gradients.follow_presence(followed.presence);
}

// What was assigned to `.grad` elsewhere is not known here.
void Engine::JoinState::require_gradients() const {
  const std::vector<uint8_t>& theirs = round_.followed().presence;
  for (int64_t i = 0; i < impl_.table.size() && impl_.options.stage > 0; ++i) {
    TORCH_CHECK(
        theirs.at(i) == 0 || impl_.gradients.has_gradient(i),
        "[zero.optim] parameter '",
        impl_.table.entry(i).parameter.name,
        "' has a gradient on rank ",
        round_.source,
        " that no backward gave it, and rank ",
        impl_.communicator->rank(),
        ", whose data has ended, has none; don't assign to .grad inside zero.join");
  }
}

void Engine::JoinState::perform(Engine& engine, const ForeignStep& step) {
  const JoinMessage action = round_.followed();
  const std::array<double, 3>& arguments = action.arguments;
  try {
    switch (action.action) {
    case JoinAction::step:
      engine.step(optim::unpack(action.text));
      break;
    case JoinAction::foreign_step:
      step(action.text);
      break;
    case JoinAction::clip_norm:
      engine.clip_grad_norm(arguments[0], arguments[1], arguments[2] != 0.0);
      break;
    case JoinAction::clip_value:
      engine.clip_grad_value(arguments[0]);
      break;
    case JoinAction::divide: // without tokens of its own
      engine.divide_gradients(arguments[0], arguments[1] != 0.0);
      break;
    case JoinAction::norm:
      engine.grad_norm(arguments[0]);
      break;
    case JoinAction::norms:
      engine.grad_norms(arguments[0]);
      break;
    default:
      engine.synchronize();
    }
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const c10::Error&) {
    // A gradient that is not finite: what comes of it the active ranks decide.
    const bool agreed = action.action == JoinAction::clip_norm
        ? arguments[2] != 0.0
        : impl_.options.on_nonfinite == "raise";
    if (!agreed) {
      throw;
    }
  }
}

void Engine::JoinState::serve_gathers() noexcept {
  try {
    const c10::AutoGradMode no_grad(false);
    while (serve_gather()) {
    }
  } catch (...) {
    const std::string text = comm::text_of(std::current_exception());
    {
      const std::lock_guard lock(mutex_);
      gather_error_ = std::current_exception();
    }
    impl_.communicator->abort("its gathers inside zero.join failed: " + text);
  }
}

bool Engine::JoinState::serve_gather() {
  const optim::JoinRound round = optim::meet(*impl_.gathers, {});
  if (round.active.empty()) {
    return false;
  }
  const JoinMessage& gather = round.followed();
  {
    // Its shard is that of the step after which they gather.
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return over_ || steps_done_ >= gather.actions; });
    if (over_) {
      return false;
    }
  }
  const auto bucket = static_cast<int64_t>(gather.arguments[0]);
  const sharding::BucketEntry& entry = impl_.table.bucket(bucket);
  const at::Tensor whole = at::empty({entry.layout.numel}, entry.options);
  impl_.gathers
      ->all_gather(
          whole,
          entry.values.tensor(),
          {entry.what,
           bucket,
           static_cast<int64_t>(gather.arguments[1]),
           gather.arguments[2] != 0.0})
      ->wait();
  return true;
}

} // namespace zero
