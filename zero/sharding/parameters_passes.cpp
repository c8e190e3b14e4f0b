// ParameterManager at the ends of passes and steps, and after a failure.

#include <zero/sharding/parameters.h>

#include <algorithm>
#include <ranges>

#include <zero/comm/blocking.h>

namespace zero::sharding {

// What has its gradient is not read again in this backward.
void ParameterManager::gradients_complete(int64_t bucket) {
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  const int64_t unit = table_.bucket(bucket).unit;
  Unit& complete = *units_[unit];
  if (complete.state == State::sharded || needed(complete) ||
      contains(schedule_.ahead(kNear), unit)) {
    return;
  }
  for (size_t b = 0; b < complete.buckets.size(); ++b) {
    if (complete.buckets[b] == bucket) {
      release_bucket(complete, b);
      complete.state = State::partly;
    }
  }
  const auto held = [](const memory::Slab& slab) { return static_cast<bool>(slab); };
  if (std::none_of(complete.slabs.begin(), complete.slabs.end(), held)) {
    complete.state = State::sharded;
    complete.kept = false;
  }
}

void ParameterManager::end_backward() {
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  for (int64_t unit = 0; unit < unit_count(); ++unit) {
    units_[unit]->kept = false;
    release_unless_needed(unit);
  }
  schedule_.end_pass();
  last_used_ = -1;
}

void ParameterManager::before_step() {
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  depth_ = 0; // a forward that was torn down left no notice
  for (int64_t unit = 0; unit < unit_count(); ++unit) {
    units_[unit]->entered = 0;
    TORCH_CHECK(
        units_[unit]->held == 0,
        "[zero.sharding] unit ",
        units_[unit]->name,
        " is held whole by zero.gathered(...) (rank ",
        table_.rank(),
        " of ",
        table_.world_size(),
        "), and a step would change it; step outside");
    units_[unit]->kept = false;
    release_unless_needed(unit);
  }
  schedule_.restart();
  last_used_ = -1;
  ++steps_;
  pool_->trim();
}

void ParameterManager::discard() {
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  depth_ = 0;
  for (int64_t unit = 0; unit < unit_count(); ++unit) {
    Unit& discarded = *units_[unit];
    discarded.entered = 0;
    discarded.kept = false;
    if (!discarded.restored && !(discarded.held > 0 && discarded.state == State::whole)) {
      release(unit);
    }
  }
  schedule_ = {};
  last_used_ = -1;
}

std::vector<int64_t> ParameterManager::backward_order() const {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> order;
  std::vector<bool> added(units_.size());
  const auto add = [&](int64_t unit) {
    const std::vector<int64_t>& buckets = units_[unit]->buckets;
    order.insert(order.end(), buckets.begin(), buckets.end());
    added[unit] = true;
  };
  for (const int64_t unit : std::ranges::reverse_view(schedule_.forward_order())) {
    add(unit);
  }
  for (int64_t unit = unit_count() - 1; unit >= 0; --unit) {
    if (!added[unit]) {
      add(unit);
    }
  }
  return order;
}

} // namespace zero::sharding
