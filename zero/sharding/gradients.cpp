#include <zero/sharding/gradients.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include <ATen/core/grad_mode.h>

namespace zero::sharding {
namespace {

// Element for element in the order of memory.
bool same_memory_format(const at::Tensor& one, const at::Tensor& other) {
  return one.layout() == at::kStrided && one.dtype() == other.dtype() &&
      one.device() == other.device() && one.sizes() == other.sizes() &&
      one.strides() == other.strides() && !one.is_conj() && !one.is_neg() &&
      !one._is_zerotensor() && !one.unsafeGetTensorImpl()->is_python_dispatch();
}

std::string reduced_message(const ParameterTable& table, const ParameterEntry& entry) {
  return "[zero.sharding] gradient of parameter '" + entry.parameter.name + "' is sharded (rank " +
      std::to_string(table.rank()) + " of " + std::to_string(table.world_size()) +
      "): this operation needs the whole gradient; use the optimizer's clip_grad_norm_ to clip, "
      "zero::full_grad to read it";
}

} // namespace

GradientManager::GradientManager(
    const GradientContext& context,
    std::unique_ptr<GradientStorage> storage,
    bool whole)
    : context_(context),
      table_(context.table),
      communicator_(context.communicator),
      storage_(std::move(storage)),
      whole_(whole),
      sums_(context.table, context.account) {
  grow();
}

void GradientManager::make_slot(int64_t index) {
  const ParameterEntry& entry = table_.entry(index);
  const at::Tensor& tensor = entry.parameter.tensor;
  Slot& slot = slots_[index];
  std::tie(slot.alias, slot.view) = memory::SlabView::make(
      tensor.sizes(), tensor.strides(), table_.bucket(entry.slot.bucket).options);
  if (!whole_) {
    slot.reduced_message = reduced_message(table_, entry);
    slot.view.release(slot.reduced_message);
  }
  if (whole_ || !slot.stand_in.defined()) {
    slot.stand_in = slot.alias;
  }
}

void GradientManager::grow() {
  const std::lock_guard lock(mutex_);
  extend();
}

void GradientManager::extend() {
  for (auto i = static_cast<int64_t>(slots_.size()); i < table_.size(); ++i) {
    slots_.emplace_back();
    if (table_.entry(i).trainable) {
      make_slot(i);
    }
  }
  for (auto b = static_cast<int64_t>(buckets_.size()); b < table_.bucket_count(); ++b) {
    buckets_.emplace_back();
    buckets_.back().pending = static_cast<int64_t>(table_.bucket(b).layout.parameters.size());
    if (table_.bucket(b).trainable) {
      order_.push_back(b);
    }
  }
}

void GradientManager::expect_order(const std::vector<int64_t>& order) {
  const std::lock_guard lock(mutex_);
  if (order_adapted_) {
    return;
  }
  order_.clear();
  std::copy_if(order.begin(), order.end(), std::back_inserter(order_), [this](int64_t bucket) {
    return table_.bucket(bucket).trainable;
  });
}

void GradientManager::set_stand_ins(std::vector<at::Tensor> stand_ins) {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < stand_ins.size() && i < slots_.size(); ++i) {
    if (stand_ins[i].defined() && !whole_) {
      slots_[i].stand_in = std::move(stand_ins[i]);
    }
  }
}

void GradientManager::set_sync(bool sync) {
  const std::lock_guard lock(mutex_);
  sync_ = sync;
}

bool GradientManager::sync() const {
  const std::lock_guard lock(mutex_);
  return sync_;
}

at::Tensor& GradientManager::grad_of(int64_t index) const {
  return table_.entry(index).parameter.tensor.mutable_grad();
}

void GradientManager::begin_backward() {
  active_ = true;
  ++backward_;
  active_sync_ = sync_;
  next_ = 0;
  completed_.clear();
}

int64_t GradientManager::before_accumulate(int64_t index) {
  const std::lock_guard lock(mutex_);
  recover_if_abandoned();
  const bool opened = !active_;
  if (opened) {
    if (stepper_) {
      begin_stepping(index);
    }
    begin_backward();
  }
  if (!table_.entry(index).trainable) {
    return opened ? backward_ : 0; // unfrozen: autograd's own, until the ranks know of it
  }
  if (buckets_[table_.entry(index).slot.bucket].launched) {
    refuse_late(index);
    reopen(table_.entry(index).slot.bucket);
  }
  take_slot(index);
  return opened ? backward_ : 0;
}

// Where something is to be added to, makes `.grad` the slot in the open bucket: with
// what this rank has accumulated so far, or zeroed. The first gradient of a slot is
// left to autograd, which need not add it to anything.
void GradientManager::take_slot(int64_t index) {
  Slot& slot = slots_[index];
  const layout::Slot& place = table_.entry(index).slot;
  at::Tensor& grad = grad_of(index);
  const bool ours = grad.defined() && (grad.is_same(slot.alias) || grad.is_same(slot.stand_in));
  if (ours && slot.state == GradientState::local) {
    if (sums_.has(index)) {
      sums_.take_out(index, open(place.bucket));
    }
    return;
  }
  sums_.forget(index);
  if (ours) {
    put_aside(place.bucket, index);
  } else {
    slot.kept = slot.kept && buckets_[place.bucket].late;
  }
  if (!grad.defined()) {
    slot.state = GradientState::none;
    return;
  }
  const at::Tensor& whole = open(place.bucket);
  slot.view.point_to(whole, place.offset);
  if (ours) {
    memory::zero_elements(whole, place.offset, place.numel);
  } else {
    const at::NoGradGuard no_grad;
    slot.alias.copy_(grad.detach());
  }
  grad = slot.alias;
  slot.state = GradientState::local;
}

// What autograd made `.grad`, if not the slot, goes into the slot: a first gradient,
// or one that create_graph=True put in the place of the sum.
void GradientManager::fill_slot(int64_t index) {
  Slot& slot = slots_[index];
  at::Tensor& grad = grad_of(index);
  if (!grad.defined() || grad.is_same(slot.alias)) {
    return;
  }
  const layout::Slot& place = table_.entry(index).slot;
  const at::Tensor& whole = open(place.bucket);
  slot.view.point_to(whole, place.offset);
  if (same_memory_format(grad, slot.alias)) {
    memory::copy_elements(whole, place.offset, grad, 0, place.numel);
  } else {
    const at::NoGradGuard no_grad;
    slot.alias.copy_(grad.layout() == at::kStrided ? grad.detach() : grad.detach().to_dense());
  }
  grad = slot.alias;
  slot.state = GradientState::local;
}

// The bucket's whole gradient, of which what lies between the slots is zero. How many
// are held at once must not depend on how fast reductions are: the peak is the same
// in every step.
const at::Tensor& GradientManager::open(int64_t bucket) {
  if (!storage_->is_open(bucket)) {
    make_room();
  }
  return storage_->open(bucket);
}

void GradientManager::put_aside(int64_t bucket, int64_t index) {
  Slot& slot = slots_[index];
  if (slot.state == GradientState::reduced && !slot.kept) {
    storage_->keep(bucket, table_.entry(index).slot.range());
    slot.kept = true;
  }
}

int64_t GradientManager::after_accumulate(int64_t index) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  if (!table_.entry(index).trainable) {
    slot.state = GradientState::local;
    return -1;
  }
  fill_slot(index);
  if (slot.state == GradientState::local &&
      (sums_.has(index) || (!active_sync_ && sums_.wants(index)))) {
    sums_.add(index, open(table_.entry(index).slot.bucket));
  }
  int64_t complete = -1;
  if (!slot.seen) {
    slot.seen = true;
    const int64_t bucket = table_.entry(index).slot.bucket;
    if (--buckets_[bucket].pending == 0) {
      completed_.push_back(bucket);
      complete = bucket;
    }
  }
  if (active_sync_) {
    launch_complete();
  }
  return complete;
}

void GradientManager::launch_complete() {
  while (next_ < order_.size()) {
    const Bucket& bucket = buckets_[order_[next_]];
    if (bucket.pending > 0 || bucket.deferred) {
      return;
    }
    launch(order_[next_++]);
  }
}

// Slots that this rank did not fill count as zero.
void GradientManager::seal(int64_t bucket, bool* add) {
  const bool late = buckets_[bucket].late;
  const std::vector<int64_t>& parameters = table_.bucket(bucket).layout.parameters;
  *add = late;
  for (const int64_t index : parameters) {
    Slot& slot = slots_[index];
    if (!grad_of(index).defined()) {
      slot.state = GradientState::none;
      slot.kept = slot.kept && late;
      sums_.forget(index);
    }
    *add = *add || slot.kept || slot.state == GradientState::reduced;
  }
  const at::Tensor& whole = storage_->open(bucket);
  for (const int64_t index : parameters) {
    Slot& slot = slots_[index];
    const layout::Range range = table_.entry(index).slot.range();
    if (slot.state != GradientState::local) {
      put_aside(bucket, index);
      memory::zero_elements(whole, range.begin, range.size());
    }
    if (*add && !slot.kept) {
      storage_->drop(bucket, range);
    }
  }
}

void GradientManager::launch(int64_t bucket) {
  if (eager_) {
    publish_stepped(kMaxLaunched - 1);
  }
  bool add = false;
  seal(bucket, &add);
  const BucketEntry& entry = table_.bucket(bucket);
  at::Tensor sums = sums_.seal(bucket, storage_->open(bucket));
  if (context_.reduced_dtype(bucket) == entry.options.dtype().toScalarType()) {
    sums.reset(); // the bucket shows them, rounded
  }
  buckets_[bucket].work = storage_->reduce(bucket, add, sums, {entry.what, bucket, steps_, true});
  buckets_[bucket].launched = true;
  in_flight_.push_back(bucket);
  for (const int64_t index : entry.layout.parameters) {
    Slot& slot = slots_[index];
    slot.kept = false;
    if (slot.state == GradientState::local) {
      slot.contributed = true;
      show_reduced(index);
    }
  }
  if (eager_) {
    send_usage(bucket);
  }
}

// From here on `.grad` is what a reduced gradient is.
void GradientManager::show_reduced(int64_t index) {
  Slot& slot = slots_[index];
  slot.state = GradientState::reduced;
  if (whole_) {
    const layout::Slot& place = table_.entry(index).slot;
    if (!grad_of(index).defined()) {
      slot.view.point_to(storage_->open(place.bucket), place.offset);
    }
  } else {
    slot.view.release(slot.reduced_message);
  }
  grad_of(index) = slot.stand_in;
}

// A launched bucket gets another gradient (a parameter that is used in several
// graphs of one backward): what was reduced is put aside and a second reduction
// adds the rest. From the next backward on the bucket waits for the end.
void GradientManager::reopen(int64_t bucket) {
  wait_for(bucket);
  const int64_t numel = table_.bucket(bucket).layout.numel;
  storage_->keep(bucket, {0, numel});
  memory::zero_elements(storage_->open(bucket), 0, numel);
  buckets_[bucket].late = true;
  buckets_[bucket].launched = false;
  for (const int64_t index : table_.bucket(bucket).layout.parameters) {
    slots_[index].kept = true;
  }
}

void GradientManager::wait_for(int64_t bucket) {
  Bucket& waited = buckets_[bucket];
  if (waited.work) {
    waited.work->wait();
    waited.work = nullptr;
    storage_->finish(bucket);
    context_.reducer->finish(bucket);
    std::erase(in_flight_, bucket);
    if (eager_) {
      step_reduced(bucket);
    }
  }
}

void GradientManager::make_room() {
  while (static_cast<int64_t>(in_flight_.size()) >= max_in_flight()) {
    wait_oldest();
  }
}

void GradientManager::wait_oldest() {
  wait_for(in_flight_.front());
}

} // namespace zero::sharding
