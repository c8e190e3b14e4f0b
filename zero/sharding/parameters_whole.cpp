// ParameterManager's whole units outside training: held for a while, written to,
// or given back for good; and its shards, where they are on the host.

#include <zero/sharding/parameters.h>

#include <algorithm>
#include <utility>

#include <zero/comm/blocking.h>

namespace zero::sharding {

void ParameterManager::take_shard(int64_t bucket) {
  if (host_) {
    host_->take(bucket);
  }
}

void ParameterManager::settle_shards() {
  if (host_) {
    host_->settle();
  }
}

std::vector<comm::WorkPtr> ParameterManager::start_gathers(std::vector<comm::Gather> gathers) {
  return host_ ? host_->gather(*communicator_, std::move(gathers))
               : communicator_->all_gather_together(std::move(gathers));
}

void ParameterManager::hold(const std::vector<int64_t>& units, bool writable) {
  check_process();
  before_use_();
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  for (const int64_t unit : units) {
    if (units_[unit]->state != State::whole) {
      start(unit, false);
    }
  }
  for (const int64_t unit : units) {
    land(unit);
  }
  for (const int64_t unit : units) {
    ++units_[unit]->held;
    units_[unit]->writable += writable ? 1 : 0;
  }
}

void ParameterManager::store(int64_t unit) {
  const std::lock_guard lock(mutex_);
  const Unit& stored = *units_[unit];
  TORCH_INTERNAL_ASSERT(stored.state == State::whole);
  for (size_t b = 0; b < stored.buckets.size(); ++b) {
    const BucketEntry& entry = table_.bucket(stored.buckets[b]);
    memory::copy_elements(
        entry.values.tensor(), 0, stored.slabs[b].tensor, entry.held.begin, entry.held.size());
  }
}

void ParameterManager::let_go(const std::vector<int64_t>& units, bool writable) noexcept {
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  for (const int64_t unit : units) {
    --units_[unit]->held;
    units_[unit]->writable -= writable ? 1 : 0;
    release_unless_needed(unit);
  }
}

void ParameterManager::refuse_writable() const {
  const std::lock_guard lock(mutex_);
  for (const auto& unit : units_) {
    TORCH_CHECK(
        unit->writable == 0,
        "[zero.sharding] unit ",
        unit->name,
        " is held whole by zero.gathered(..., writeback=True) (rank ",
        table_.rank(),
        " of ",
        table_.world_size(),
        "), and a backward with step_in_backward would change it; run backward outside");
  }
}

void ParameterManager::begin_load(int64_t index) {
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  settle_shards();
  ParameterEntry& entry = table_.entry(index);
  Unit& unit = *units_[entry.parameter.unit];
  const auto loading = std::find_if(
      loads_.begin(), loads_.end(), [index](const Load& load) { return load.index == index; });
  if (loading != loads_.end()) {
    ++loading->depth;
    return;
  }
  if (unit.held == 0) {
    unit.kept = false;
    release_unless_needed(entry.parameter.unit);
  }
  Load load{index, {}, 1};
  if (unit.state == State::whole) {
    ++unit.writable;
  } else {
    const BucketEntry& bucket = table_.bucket(entry.slot.bucket);
    load.scratch = memory::FlatBuffer(
        entry.slot.numel, bucket.options, memory::Purpose::buffers, pool_->account());
    const layout::Range part = layout::within(entry.slot, bucket.held);
    memory::copy_elements(
        load.scratch.tensor(),
        part.begin,
        bucket.values.tensor(),
        entry.slot.offset + part.begin - bucket.held.begin,
        part.size());
    entry.view.point_to(load.scratch.tensor(), 0);
  }
  loads_.push_back(std::move(load));
}

void ParameterManager::end_load(int64_t index) {
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  const auto load = std::find_if(
      loads_.begin(), loads_.end(), [index](const Load& item) { return item.index == index; });
  if (load == loads_.end() || --load->depth > 0) {
    return;
  }
  settle_shards();
  ParameterEntry& entry = table_.entry(index);
  Unit& unit = *units_[entry.parameter.unit];
  if (load->scratch) {
    table_.load(index, load->scratch.tensor());
    if (unit.state != State::whole) {
      entry.view.release(message_of(index), &unit);
    }
  } else {
    --unit.writable;
    table_.load(index, entry.parameter.tensor);
  }
  loads_.erase(load);
}

void ParameterManager::restore(int64_t unit) {
  check_process();
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  Unit& restored = *units_[unit];
  if (restored.state != State::whole) {
    start(unit, false);
  }
  land(unit);
  settle_shards();
  for (size_t b = 0; b < restored.buckets.size(); ++b) {
    BucketEntry& bucket = table_.bucket(restored.buckets[b]);
    const auto numel = bucket.layout.numel;
    memory::FlatBuffer own(numel, bucket.options, memory::Purpose::parameters, pool_->account());
    memory::copy_elements(own.tensor(), 0, restored.slabs[b].tensor, 0, numel);
    for (const int64_t index : bucket.layout.parameters) {
      ParameterEntry& entry = table_.entry(index);
      entry.view.point_to(own.tensor(), entry.slot.offset);
    }
    bucket.values = {};
    pool_->give(std::exchange(restored.slabs[b], {}));
  }
  restored.restored = true;
}

} // namespace zero::sharding
