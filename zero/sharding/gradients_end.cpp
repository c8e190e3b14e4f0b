// GradientManager's end of backward: what is left is reduced, the ranks tell each
// other what they used, and `.grad` becomes what the user sees.

#include <zero/sharding/gradients.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <zero/memory/large_blocks.h>

namespace zero::sharding {
namespace {

int64_t bytes_for(size_t bits) {
  return static_cast<int64_t>((bits + 7) / 8);
}

void set_bit(uint8_t* bits, size_t index) {
  bits[index / 8] = static_cast<uint8_t>(bits[index / 8] | (1U << (index % 8)));
}

bool get_bit(const uint8_t* bits, size_t index) {
  return ((bits[index / 8] >> (index % 8)) & 1U) != 0;
}

} // namespace

void GradientManager::end_backward(int64_t backward) {
  const std::lock_guard lock(mutex_);
  if (!active_ || backward != backward_) {
    return;
  }
  memory::drop_large_block(); // autograd makes no more gradients
  if (active_sync_) {
    try {
      finish_reduction();
    } catch (...) {
      abandoned_ = backward_;
      lost_ = std::current_exception();
      throw;
    }
  }
  reset_backward();
}

void GradientManager::abandon(int64_t backward) noexcept {
  abandoned_ = backward; // perhaps inside our own lock: only noted here
}

void GradientManager::finish_reduction() {
  for (const int64_t bucket : order_) {
    if (!buckets_[bucket].launched) {
      if (buckets_[bucket].late) {
        continue; // its second reduction comes once all ranks know of it
      }
      make_room();
      launch(bucket);
    }
  }
  const Agreement agreement = agree();
  while (!in_flight_.empty()) {
    wait_oldest();
  }
  reduce_late(agreement.late);
  reduce_unfrozen(agreement.used);
  if (eager_) {
    publish_stepped(0);
    return;
  }
  for (int64_t i = 0; i < table_.size(); ++i) {
    Slot& slot = slots_[i];
    if (table_.entry(i).trainable && agreement.used[i] && slot.state == GradientState::none) {
      show_reduced(i);
    }
  }
  if (stepper_) {
    step_all(agreement.used);
  }
}

void GradientManager::reduce_late(const std::vector<bool>& late) {
  for (const int64_t bucket : std::vector<int64_t>(order_)) {
    if (!late[bucket]) {
      continue;
    }
    if (!buckets_[bucket].late) {
      reopen(bucket);
    }
    launch(bucket);
    wait_for(bucket);
    buckets_[bucket].deferred = true;
  }
  std::stable_partition(
      order_.begin(), order_.end(), [this](int64_t bucket) { return !buckets_[bucket].deferred; });
}

GradientManager::Agreement GradientManager::agree() {
  const size_t parameters = slots_.size();
  const size_t bucket_count = buckets_.size();
  const int64_t used_bytes = bytes_for(parameters);
  const int64_t late_bytes = bytes_for(bucket_count);
  const int64_t order_bytes =
      order_adapted_ ? 0 : static_cast<int64_t>(order_.size() * sizeof(int64_t));
  at::Tensor message = at::empty({used_bytes + late_bytes + order_bytes}, at::kByte);
  auto* bytes = message.mutable_data_ptr<uint8_t>();
  std::memset(bytes, 0, message.numel());
  for (size_t i = 0; i < parameters; ++i) {
    // A late bucket's second contribution is local still.
    const bool local = slots_[i].state == GradientState::local && grad_of(i).defined();
    if (slots_[i].contributed || local) {
      set_bit(bytes, i);
    }
  }
  for (size_t b = 0; b < bucket_count; ++b) {
    if (buckets_[b].late) {
      set_bit(bytes + used_bytes, b);
    }
  }
  if (order_bytes > 0) {
    std::vector<int64_t> order = completed_;
    for (const int64_t bucket : order_) {
      if (std::find(completed_.begin(), completed_.end(), bucket) == completed_.end()) {
        order.push_back(bucket);
      }
    }
    std::memcpy(bytes + used_bytes + late_bytes, order.data(), order_bytes);
  }
  const std::vector<at::Tensor> messages =
      communicator_->exchange(message, {"the end of backward", 0, steps_, false});
  Agreement agreement{std::vector<bool>(parameters), std::vector<bool>(bucket_count)};
  for (const at::Tensor& other : messages) {
    const auto* theirs = other.const_data_ptr<uint8_t>();
    for (size_t i = 0; i < parameters; ++i) {
      agreement.used[i] = agreement.used[i] || get_bit(theirs, i);
    }
    for (size_t b = 0; b < bucket_count; ++b) {
      agreement.late[b] = agreement.late[b] || get_bit(theirs + used_bytes, b);
    }
  }
  if (order_bytes > 0) {
    const auto* first = messages[order_source_].const_data_ptr<uint8_t>() + used_bytes + late_bytes;
    std::memcpy(order_.data(), first, order_bytes);
    order_adapted_ = true;
  }
  return agreement;
}

void GradientManager::reset_backward() {
  storage_->end_backward();
  context_.reducer->end_backward();
  for (Slot& slot : slots_) {
    slot.seen = false;
    slot.contributed = false;
  }
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    bucket.pending = static_cast<int64_t>(table_.bucket(b).layout.parameters.size());
    bucket.launched = false;
    bucket.late = false;
    bucket.stepped = false;
    bucket.usage_work = nullptr;
  }
  launched_.clear();
  eager_ = false;
  active_ = false;
}

bool GradientManager::lost_backward() const {
  return active_ && abandoned_ == backward_;
}

// A backward ended in an exception. If it did so on all ranks at the same point,
// what they launched completes, and the next iteration is clean.
void GradientManager::recover_if_abandoned() {
  if (lost_backward()) {
    torn_ = torn_ || stepped_;
    stepped_ = false;
    eager_ = false; // nothing more is stepped
    while (!in_flight_.empty()) {
      wait_oldest();
    }
    reset_backward();
  }
}

void GradientManager::settle_in_flight() {
  for (const int64_t bucket : in_flight_) {
    buckets_[bucket].work->settle();
    buckets_[bucket].work = nullptr;
    storage_->finish(bucket);
    context_.reducer->finish(bucket);
  }
  in_flight_.clear();
}

bool GradientManager::idle() const {
  const std::lock_guard lock(mutex_);
  return !active_ || lost_backward();
}

bool GradientManager::intact() const {
  const std::lock_guard lock(mutex_);
  return !active_ && in_flight_.empty();
}

void GradientManager::discard() {
  const std::lock_guard lock(mutex_);
  settle_in_flight();
  lost_ = nullptr;
  stepped_ = false;
  storage_->close_all();
  sums_.clear();
  for (int64_t i = 0; i < table_.size(); ++i) {
    Slot& slot = slots_[i];
    at::Tensor& grad = grad_of(i);
    const bool unfrozen = !table_.entry(i).trainable && slot.state == GradientState::local;
    if (unfrozen || (grad.defined() && (grad.is_same(slot.alias) || grad.is_same(slot.stand_in)))) {
      grad.reset();
    }
    slot.state = GradientState::none;
    slot.kept = false;
  }
  reset_backward();
  reset_order();
}

// What ranks learned of it together may be known to some of them only.
void GradientManager::reset_order() {
  order_.clear();
  for (int64_t b = 0; b < table_.bucket_count(); ++b) {
    buckets_[b].deferred = false;
    if (table_.bucket(b).trainable) {
      order_.push_back(b);
    }
  }
  order_adapted_ = false;
}

void GradientManager::flush() {
  const std::lock_guard lock(mutex_);
  if (lost_) {
    std::rethrow_exception(lost_);
  }
  recover_if_abandoned();
  const bool local = std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.state == GradientState::local;
  });
  if ((!local && !active_) || torn_) {
    return;
  }
  finish_reduction();
  reset_backward();
}

void GradientManager::zero(bool set_to_none) {
  const std::lock_guard lock(mutex_);
  if (lost_backward()) {
    settle_in_flight(); // what failed says so at the next operation
    torn_ = torn_ || stepped_;
    stepped_ = false;
    reset_backward();
  }
  lost_ = nullptr;
  for (int64_t i = 0; i < table_.size(); ++i) {
    Slot& slot = slots_[i];
    at::Tensor& grad = grad_of(i);
    if (set_to_none) {
      grad.reset();
      slot.state = GradientState::none;
      slot.kept = false;
      continue;
    }
    if (!grad.defined()) {
      continue;
    }
    const ParameterEntry& entry = table_.entry(i);
    if (!entry.trainable || !(grad.is_same(slot.alias) || grad.is_same(slot.stand_in))) {
      const at::NoGradGuard no_grad;
      grad.detach_().zero_();
    } else if (slot.state == GradientState::local) {
      memory::zero_elements(storage_->open(entry.slot.bucket), entry.slot.offset, entry.slot.numel);
      storage_->drop(entry.slot.bucket, entry.slot.range());
    } else {
      storage_->zero(entry.slot.bucket, entry.slot.range());
    }
    sums_.forget(i);
  }
  if (set_to_none && !active_) {
    storage_->close_all();
    sums_.clear();
  }
}

void GradientManager::forget() {
  for (int64_t i = 0; i < table_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!table_.entry(i).trainable || (whole_ && slot.state != GradientState::local)) {
      continue;
    }
    at::Tensor& grad = grad_of(i);
    if (grad.defined() && (grad.is_same(slot.alias) || grad.is_same(slot.stand_in))) {
      grad.reset();
    }
  }
  storage_->clear();
}

void GradientManager::import_assigned() {
  const std::lock_guard lock(mutex_);
  for (int64_t i = 0; i < table_.size(); ++i) {
    Slot& slot = slots_[i];
    at::Tensor& grad = grad_of(i);
    const ParameterEntry& entry = table_.entry(i);
    if (!grad.defined()) {
      slot.state = GradientState::none;
      slot.kept = false;
      continue;
    }
    TORCH_CHECK(
        entry.trainable,
        "[zero.sharding] parameter '",
        entry.parameter.name,
        "' was frozen when it was wrapped and has a gradient that no backward through this model "
        "gave it, so it was not reduced (rank ",
        table_.rank(),
        " of ",
        table_.world_size(),
        "); unfreeze it and run a backward that reaches it, or set requires_grad before wrapping");
    if (grad.is_same(slot.alias) || grad.is_same(slot.stand_in)) {
      slot.state = GradientState::reduced;
      continue;
    }
    const at::NoGradGuard no_grad;
    const at::Tensor& tensor = entry.parameter.tensor;
    const at::Tensor dense =
        at::empty_strided(tensor.sizes(), slot.alias.strides(), slot.alias.options());
    dense.copy_(grad.detach());
    storage_->assign(entry.slot.bucket, entry.slot.range(), dense);
    grad.reset();
    show_reduced(i);
  }
  for (int64_t b = 0; b < table_.bucket_count(); ++b) {
    if (table_.bucket(b).trainable) {
      storage_->take_shown(b);
    }
  }
}

bool GradientManager::has_gradient(int64_t index) const {
  return table_.entry(index).trainable && grad_of(index).defined();
}

at::Tensor GradientManager::reduced(int64_t bucket) {
  const std::lock_guard lock(mutex_);
  return storage_->reduced(bucket);
}

void GradientManager::reduced_changed(int64_t bucket) {
  const std::lock_guard lock(mutex_);
  storage_->show(bucket);
}

layout::Range GradientManager::reduced_range(int64_t bucket) const {
  return storage_->reduced_range(bucket);
}

} // namespace zero::sharding
