#include <zero/optim/join.h>

#include <exception>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>

#include <zero/comm/error_text.h>
#include <zero/optim/zero_optimizer.h>

namespace zero {
namespace {

// A rank that waits in the inner of two joins could not follow the outer one.
thread_local int64_t open_joins = 0;

bool over_active(const JoinOptions& options) {
  TORCH_CHECK_VALUE(
      options.average_over == "active" || options.average_over == "all",
      "[zero.optim] expected average_over \"active\" or \"all\", got \"",
      options.average_over,
      "\"");
  return options.average_over == "active";
}

} // namespace

Join::Join(ZeroOptimizer& optimizer, const JoinOptions& options)
    : Join(std::vector<ZeroOptimizer*>{&optimizer}, options) {}

Join::Join(std::vector<ZeroOptimizer*> optimizers, const JoinOptions& options)
    : optimizers_(std::move(optimizers)) {
  const bool active = over_active(options);
  TORCH_CHECK_VALUE(!optimizers_.empty(), "[zero.optim] expected an optimizer to join, got none");
  TORCH_CHECK_VALUE(
      open_joins == 0,
      "[zero.optim] expected no zero::join inside another on the same thread; give one join all "
      "the optimizers");
  try {
    for (ZeroOptimizer* optimizer : optimizers_) {
      optimizer->engine().begin_join(active);
    }
  } catch (...) {
    for (ZeroOptimizer* optimizer : optimizers_) {
      optimizer->engine().fail_join(comm::text_of(std::current_exception()));
    }
    throw;
  }
  ++open_joins;
  open_ = true;
}

Join::~Join() {
  fail("it was left without finish(): see its own error");
}

void Join::fail(const std::string& why) noexcept {
  if (!std::exchange(open_, false)) {
    return;
  }
  --open_joins;
  for (ZeroOptimizer* optimizer : optimizers_) {
    optimizer->engine().fail_join(why);
  }
}

void Join::finish() {
  if (!std::exchange(open_, false)) {
    return;
  }
  --open_joins;
  std::vector<std::exception_ptr> errors(optimizers_.size());
  const auto shadow = [&](size_t at) noexcept {
    try {
      ZeroOptimizer& optimizer = *optimizers_[at];
      optimizer.engine().shadow_join(
          [&](const std::string& hyperparameters) { optimizer.follow_step(hyperparameters); });
    } catch (...) {
      errors[at] = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  for (size_t i = 1; i < optimizers_.size(); ++i) {
    others.emplace_back(shadow, i);
  }
  shadow(0);
  for (std::thread& other : others) {
    other.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

void join(
    const std::vector<ZeroOptimizer*>& optimizers,
    const std::function<void()>& body,
    const JoinOptions& options) {
  Join scope(optimizers, options);
  try {
    body();
  } catch (...) {
    scope.fail(comm::text_of(std::current_exception()));
    throw;
  }
  scope.finish();
}

void join(ZeroOptimizer& optimizer, const std::function<void()>& body, const JoinOptions& options) {
  join(std::vector<ZeroOptimizer*>{&optimizer}, body, options);
}

} // namespace zero
