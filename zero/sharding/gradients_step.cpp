// GradientManager's part in steps, and its stepping of buckets inside backward. A
// backward whose launch order the ranks have agreed on steps each bucket once it is
// reduced and lets its gradient go; the one that shows the order steps all of them at its
// end. See [Note: stepping in backward] in docs/design.md.

#include <zero/sharding/gradients.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

namespace zero::sharding {

void GradientManager::prepare_step() {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> buckets;
  for (int64_t b = table_.bucket_count() - 1; b >= 0; --b) {
    const std::vector<int64_t>& indices = table_.bucket(b).layout.parameters;
    if (std::any_of(indices.begin(), indices.end(), [this](int64_t index) {
          return has_gradient(index);
        })) {
      buckets.push_back(b);
    }
  }
  storage_->prepare(buckets);
}

at::Tensor GradientManager::stepped_by(int64_t bucket) {
  const std::lock_guard lock(mutex_);
  return storage_->stepped_by(bucket);
}

void GradientManager::lent(int64_t bucket) {
  const std::lock_guard lock(mutex_);
  storage_->lent(bucket);
}

void GradientManager::step_in_backward(std::unique_ptr<BucketStepper> stepper) {
  const std::lock_guard lock(mutex_);
  stepper_ = std::move(stepper);
}

bool GradientManager::interrupted() const {
  const std::lock_guard lock(mutex_);
  return torn_ || (active_ && stepped_);
}

void GradientManager::tear() {
  const std::lock_guard lock(mutex_);
  torn_ = true;
}

void GradientManager::mend() {
  const std::lock_guard lock(mutex_);
  torn_ = false;
}

void GradientManager::require_untorn() const {
  TORCH_CHECK(
      !torn_,
      "[zero.sharding] a backward was left by an exception after it had stepped some parameters "
      "(step_in_backward; rank ",
      table_.rank(),
      " of ",
      table_.world_size(),
      "), so the model is between two steps; load the weights and the optimizer state of a "
      "checkpoint on all ranks");
}

int64_t GradientManager::max_in_flight() const {
  const int64_t storage = storage_->max_in_flight();
  return stepper_ ? std::min<int64_t>(storage, kMaxLaunched) : storage;
}

// Throws before a backward opens.
void GradientManager::begin_stepping(int64_t index) {
  require_untorn();
  TORCH_CHECK(
      !stepped_,
      "[zero.sharding] expected step() after each backward with step_in_backward, got a second "
      "backward, which gives parameter '",
      table_.entry(index).parameter.name,
      "' a gradient to be added to one that was stepped and is gone (rank ",
      table_.rank(),
      " of ",
      table_.world_size(),
      "); call step() first, or accumulate without step_in_backward");
  stepper_->begin();
  eager_ = order_adapted_;
}

// What other ranks stepped already can't be stepped again.
void GradientManager::refuse_late(int64_t index) const {
  const ParameterEntry& entry = table_.entry(index);
  TORCH_CHECK(
      !eager_,
      "[zero.sharding] parameter '",
      entry.parameter.name,
      "' got another gradient after ",
      table_.bucket(entry.slot.bucket).what,
      " was reduced to be stepped in this backward (rank ",
      table_.rank(),
      " of ",
      table_.world_size(),
      "): with step_in_backward, what several reentrant checkpoints share must be so in the first "
      "backward already; use non-reentrant checkpoints, or leave step_in_backward out");
}

// Which parameters of a bucket have a gradient, to all ranks. Comes right after the
// bucket's reduction on all of them.
void GradientManager::send_usage(int64_t bucket) {
  const at::NoGradGuard no_grad;
  const BucketEntry& entry = table_.bucket(bucket);
  const auto count = static_cast<int64_t>(entry.layout.parameters.size());
  const int64_t ranks = communicator_->shard_size(); // of which reductions take a multiple
  const at::Tensor usage = at::zeros({(count + ranks - 1) / ranks * ranks}, at::kFloat);
  auto* flags = usage.mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    flags[i] = slots_[entry.layout.parameters[i]].contributed ? 1.0F : 0.0F;
  }
  buckets_[bucket].usage = usage;
  buckets_[bucket].usage_work = communicator_->all_reduce(
      usage, {}, {"the use of the parameters of " + entry.what, bucket, steps_, false});
  launched_.push_back(bucket);
}

void GradientManager::step_reduced(int64_t bucket) {
  Bucket& reduced = buckets_[bucket];
  std::exchange(reduced.usage_work, nullptr)->wait();
  const auto count = static_cast<int64_t>(table_.bucket(bucket).layout.parameters.size());
  std::vector<char> used(count);
  const auto* flags = reduced.usage.const_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    used[i] = flags[i] > 0.0F ? 1 : 0;
  }
  reduced.usage.reset();
  step_bucket(bucket, used);
}

// `used`: by position in the bucket, on any rank.
void GradientManager::step_bucket(int64_t bucket, const std::vector<char>& used) {
  const std::vector<int64_t>& parameters = table_.bucket(bucket).layout.parameters;
  std::unordered_set<int64_t> stepping;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (used[i] != 0) {
      stepping.insert(parameters[i]);
    }
  }
  if (!stepping.empty()) {
    stepped_ = true;
    buckets_[bucket].stepped = true;
    stepper_->step(
        bucket,
        {storage_->stepped_by(bucket),
         storage_->reduced_range(bucket),
         [&stepping](int64_t parameter) { return stepping.count(parameter) > 0; }});
  }
  for (const int64_t index : parameters) {
    Slot& slot = slots_[index];
    at::Tensor& grad = grad_of(index);
    if (grad.defined() && (grad.is_same(slot.alias) || grad.is_same(slot.stand_in))) {
      grad.reset();
    }
    slot.state = GradientState::none;
    slot.kept = false;
    slot.view.release(
        "[zero.sharding] gradient of parameter '" + table_.entry(index).parameter.name +
        "' was stepped in backward and is gone; leave step_in_backward out to read it");
  }
  storage_->forget(bucket);
}

// Hands on what was stepped, but for the last `left` launched. Waits depend on a rank's
// own pace, what they start must not: called where all ranks are at the same launch.
void GradientManager::publish_stepped(size_t left) {
  while (launched_.size() > left) {
    const int64_t bucket = launched_.front();
    launched_.pop_front();
    wait_for(bucket);
    if (buckets_[bucket].stepped) {
      stepper_->publish(bucket);
    }
  }
}

void GradientManager::step_all(const std::vector<bool>& used) {
  for (const int64_t bucket : order_) {
    std::vector<char> of_bucket;
    for (const int64_t index : table_.bucket(bucket).layout.parameters) {
      of_bucket.push_back(used[index] ? 1 : 0);
    }
    step_bucket(bucket, of_bucket);
    if (buckets_[bucket].stepped) {
      stepper_->publish(bucket);
    }
  }
}

} // namespace zero::sharding
