// GradientManager's parameters that were frozen when they came: autograd accumulates
// their gradients by itself, and at the end of the first backward that reaches one, on
// any rank, it is taken in on all. See [Note: freezing] in docs/design.md.

#include <zero/sharding/gradients.h>

#include <utility>

namespace zero::sharding {

void GradientManager::on_unfrozen(std::function<void(int64_t bucket)> notice) {
  on_unfrozen_ = std::move(notice);
}

// Gives the buckets that became trainable, with what autograd accumulated in them.
std::vector<int64_t> GradientManager::unfreeze(const std::vector<bool>& wanted) {
  std::vector<int64_t> unfrozen;
  for (int64_t i = 0; i < table_.size(); ++i) {
    if (wanted[i] && !table_.entry(i).trainable) {
      unfrozen.push_back(i);
    }
  }
  if (unfrozen.empty()) {
    return {};
  }
  const auto known = static_cast<int64_t>(buckets_.size());
  const std::vector<int64_t> buckets = table_.unfreeze(unfrozen);
  extend();
  for (const int64_t bucket : buckets) {
    if (bucket < known) {
      order_.push_back(bucket);
    }
    if (on_unfrozen_) {
      on_unfrozen_(bucket);
    }
    for (const int64_t index : table_.bucket(bucket).layout.parameters) {
      make_slot(index);
    }
  }
  order_adapted_ = false; // the next backward shows where they belong
  return buckets;
}

void GradientManager::reduce_unfrozen(const std::vector<bool>& used) {
  for (const int64_t bucket : unfreeze(used)) {
    for (const int64_t index : table_.bucket(bucket).layout.parameters) {
      if (slots_[index].state == GradientState::local) {
        fill_slot(index);
      }
    }
    launch(bucket);
    wait_for(bucket);
  }
}

void GradientManager::catch_up(const std::vector<bool>& trainable) {
  const std::lock_guard lock(mutex_);
  for (const int64_t bucket : unfreeze(trainable)) {
    for (const int64_t index : table_.bucket(bucket).layout.parameters) {
      if (slots_[index].state == GradientState::local) {
        grad_of(index).reset();
        slots_[index].state = GradientState::none;
      }
    }
  }
}

} // namespace zero::sharding
