// GradientManager inside a join: reductions that this rank takes part in without a
// backward of its own, and gradients that follow those of the ranks that have one.

#include <zero/sharding/gradients.h>

#include <algorithm>

namespace zero::sharding {

void GradientManager::set_reduction(double divisor, int64_t source) {
  const std::lock_guard lock(mutex_);
  context_.reducer->set_divisor(divisor);
  order_source_ = source;
}

bool GradientManager::reduces() const {
  const std::lock_guard lock(mutex_);
  return active_sync_;
}

bool GradientManager::unreduced() {
  const std::lock_guard lock(mutex_);
  if (lost_) {
    std::rethrow_exception(lost_);
  }
  recover_if_abandoned();
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.state == GradientState::local;
  });
}

std::vector<int64_t> GradientManager::launch_order() const {
  const std::lock_guard lock(mutex_);
  return order_adapted_ ? std::vector<int64_t>() : order_;
}

void GradientManager::reduce_all(const std::vector<int64_t>& order) {
  const std::lock_guard lock(mutex_);
  if (lost_) {
    std::rethrow_exception(lost_);
  }
  recover_if_abandoned();
  if (!order_adapted_ && order.size() == order_.size()) {
    order_ = order;
  }
  try {
    finish_reduction();
  } catch (...) {
    lost_ = std::current_exception();
    throw;
  }
  reset_backward();
}

std::vector<uint8_t> GradientManager::presence() const {
  const std::lock_guard lock(mutex_);
  std::vector<uint8_t> present(table_.size());
  for (int64_t i = 0; i < table_.size(); ++i) {
    present[i] = has_gradient(i) ? 1 : 0;
  }
  return present;
}

void GradientManager::follow_presence(const std::vector<uint8_t>& theirs) {
  const std::lock_guard lock(mutex_);
  for (int64_t i = 0; i < table_.size(); ++i) {
    Slot& slot = slots_[i];
    if (theirs.at(i) == 0 && slot.state == GradientState::reduced) {
      grad_of(i).reset();
      slot.state = GradientState::none;
      slot.kept = false;
      sums_.forget(i);
    }
  }
}

void GradientManager::share(int64_t root, const std::vector<uint8_t>& theirs) {
  const std::lock_guard lock(mutex_);
  for (int64_t b = 0; b < table_.bucket_count(); ++b) {
    const BucketEntry& entry = table_.bucket(b);
    const std::vector<int64_t>& indices = entry.layout.parameters;
    const auto present = [&](int64_t index) { return theirs.at(index) != 0; };
    if (!entry.trainable || std::none_of(indices.begin(), indices.end(), present)) {
      continue;
    }
    communicator_->broadcast(storage_->reduced(b), root, {entry.what, b, steps_, false})->wait();
    storage_->show(b);
    for (const int64_t index : indices) {
      if (present(index)) {
        show_reduced(index);
      }
    }
  }
}

} // namespace zero::sharding
