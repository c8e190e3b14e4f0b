#include <zero/sharding/parameters.h>

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include <zero/comm/blocking.h>

namespace zero::sharding {

ParameterManager::ParameterManager(
    const Options& options,
    ParameterTable& table,
    std::shared_ptr<comm::Communicator> communicator,
    std::shared_ptr<memory::SlabPool> pool,
    std::function<bool()> inside_backward,
    std::function<void()> before_use)
    : prefetch_(options.prefetch),
      max_live_numel_(options.max_live_numel.value_or(std::numeric_limits<int64_t>::max())),
      reshard_(options.reshard_after_forward),
      table_(table),
      communicator_(std::move(communicator)),
      pool_(std::move(pool)),
      inside_backward_(std::move(inside_backward)),
      before_use_(std::move(before_use)),
      host_(
          options.offload == "parameters" ? std::make_unique<HostShards>(table, pool_->account())
                                          : nullptr),
      process_(getpid()) {}

ParameterManager::~ParameterManager() {
  for (size_t u = 0; u < units_.size(); ++u) {
    if (units_[u]->restored) {
      continue;
    }
    each_parameter(static_cast<int64_t>(u), [&](int64_t index) {
      table_.entry(index).view.release(
          table_.sharded(index) +
          " by a ZeroOptimizer or ZeroModule that is gone, so its values are gone too; call "
          "release() (Python: zero.unwrap) before dropping it");
    });
  }
}

void ParameterManager::grow(const std::vector<std::string>& names) {
  const std::lock_guard lock(mutex_);
  for (auto u = static_cast<int64_t>(units_.size()); u < static_cast<int64_t>(names.size()); ++u) {
    units_.push_back(std::make_unique<Unit>(*this, u));
    units_.back()->name = names[u].empty() ? "the root" : "'" + names[u] + "'";
  }
  for (int64_t b = 0; b < table_.bucket_count(); ++b) {
    Unit& unit = *units_[table_.bucket(b).unit];
    if (contains(unit.buckets, b)) {
      continue;
    }
    unit.buckets.push_back(b);
    unit.slabs.emplace_back();
    unit.works.emplace_back();
    unit.numel += table_.bucket(b).layout.numel;
    unit.whats.push_back("unit " + unit.name + ", " + table_.bucket(b).what);
    std::vector<std::string>& messages = unit.messages.emplace_back();
    for (const int64_t index : table_.bucket(b).layout.parameters) {
      messages.push_back(message_of(index));
      table_.entry(index).view.release(messages.back(), &unit);
    }
  }
}

std::string ParameterManager::message_of(int64_t index) const {
  return table_.sharded(index) +
      " and no forward or backward of the model is running here; read it inside "
      "zero.gathered(...), or with zero.full_param";
}

void ParameterManager::set_gather_always(bool always) {
  always_ = always;
}

void ParameterManager::on_gather(GatherNotice notice) {
  const std::lock_guard lock(mutex_);
  on_gather_ = std::move(notice);
}

const std::string& ParameterManager::name(int64_t unit) const {
  return units_[unit]->name;
}

bool ParameterManager::whole(int64_t unit) const {
  const std::lock_guard lock(mutex_);
  return units_[unit]->state == State::whole;
}

void ParameterManager::enter_forward() {
  ++depth_;
}

void ParameterManager::leave_forward() noexcept {
  --depth_;
}

void ParameterManager::enter(int64_t unit) {
  check_process();
  before_use_();
  const bool backward = inside_backward_();
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  use(unit, backward);
  ++units_[unit]->entered;
  ++depth_;
}

void ParameterManager::leave(int64_t unit) noexcept {
  const bool backward = inside_backward_();
  const comm::BlockingScope blocking;
  const std::lock_guard lock(mutex_);
  Unit& left = *units_[unit];
  if (left.entered == 0) {
    return; // its enter failed
  }
  --left.entered;
  --depth_;
  if (left.entered == 0 && !backward) { // recomputed inside backward, it is needed next
    const UnitSchedule::Units soon = schedule_.ahead(kNear);
    left.kept = left.kept || reshard_ == "false" ||
        (reshard_ == "auto" && (unit == 0 || schedule_.last(/*root=*/0)));
    if (!contains(soon, unit)) {
      release_unless_needed(unit);
    }
  }
  if (depth_ == 0 && unit == 0 && !backward) {
    schedule_.end_pass();
  }
}

void ParameterManager::use(int64_t unit, bool backward) {
  Unit& used = *units_[unit];
  // What is held is there for any number of uses, on some ranks only too.
  if (used.buckets.empty() || used.held > 0) {
    return;
  }
  const int64_t last = last_used_;
  const bool enclosed = last >= 0 && units_[last]->entered > 0;
  schedule_.use(unit, backward, enclosed);
  last_used_ = unit;
  const UnitSchedule::Units soon = schedule_.ahead(std::max(prefetch_, kNear));
  if (used.state != State::whole) {
    make_room(unit, soon);
    start(unit, true);
  }
  for (int64_t i = 0; i < std::min<int64_t>(prefetch_, static_cast<int64_t>(soon.size())); ++i) {
    const Unit& next = *units_[soon[i]];
    if (next.state == State::sharded && live_numel_ + next.numel <= max_live_numel_) {
      start(soon[i], true);
    }
  }
  land(unit);
}

void ParameterManager::make_room(int64_t unit, const UnitSchedule::Units& soon) {
  std::erase_if(gathered_, [&](int64_t other) {
    Unit& held = *units_[other];
    if (other != unit && held.state != State::sharded && !contains(soon, other)) {
      release_unless_needed(other);
    }
    held.listed = held.state != State::sharded;
    return !held.listed;
  });
}

void ParameterManager::check_process() const {
  TORCH_CHECK(
      getpid() == process_,
      "[zero.sharding] the model is sharded (rank ",
      table_.rank(),
      " of ",
      table_.world_size(),
      ") and a forked child can't gather it, since its peers are its parent's; gather before the "
      "fork, or start the process anew (spawn)");
}

// Gathers what is not there nor on its way.
void ParameterManager::start(int64_t unit, bool training) {
  Unit& started = *units_[unit];
  if (started.state == State::sharded) {
    started.kept = reshard_ == "false" || (reshard_ == "auto" && unit == 0);
  }
  started.state = State::partly;
  if (!std::exchange(started.listed, true)) {
    gathered_.push_back(unit);
  }
  Positions missing;
  for (size_t b = 0; b < started.buckets.size(); ++b) {
    if (started.slabs[b]) {
      continue;
    }
    if (on_gather_) { // whose listener follows gather by gather
      on_gather_(started.buckets[b], steps_, training);
      gather(started, {b}, training);
    } else {
      missing.push_back(b);
    }
  }
  gather(started, missing, training);
}

void ParameterManager::gather(Unit& unit, const Positions& positions, bool training) {
  if (positions.empty()) {
    return;
  }
  std::vector<comm::Gather> gathers;
  gathers.reserve(positions.size());
  for (const size_t b : positions) {
    const BucketEntry& entry = table_.bucket(unit.buckets[b]);
    unit.slabs[b] = pool_->take(entry.layout.numel, entry.options);
    gathers.push_back(
        {unit.slabs[b].tensor,
         entry.values.tensor(),
         {unit.whats[b], unit.buckets[b], steps_, training}});
    live_numel_ += entry.layout.numel;
  }
  std::vector<comm::WorkPtr> works;
  try {
    works = start_gathers(std::move(gathers));
  } catch (...) {
    for (const size_t b : positions) { // nothing of it is on its way
      release_bucket(unit, b);
    }
    throw;
  }
  for (size_t i = 0; i < works.size(); ++i) {
    unit.works[positions[i]] = std::move(works[i]);
  }
}

void ParameterManager::land(int64_t unit) {
  Unit& landed = *units_[unit];
  for (size_t b = 0; b < landed.buckets.size(); ++b) {
    if (landed.works[b]) {
      try {
        landed.works[b]->wait();
      } catch (...) {
        release(unit);
        throw;
      }
      landed.works[b] = nullptr;
    }
    std::optional<memory::SlabView::Source> source;
    for (const int64_t index : table_.bucket(landed.buckets[b]).layout.parameters) {
      ParameterEntry& entry = table_.entry(index);
      if (!entry.view.closed()) {
        continue;
      }
      if (!source) {
        source.emplace(landed.slabs[b].tensor, &landed);
      }
      entry.view.point_to(*source, entry.slot.offset);
    }
  }
  landed.state = State::whole;
}

void ParameterManager::release_bucket(Unit& unit, size_t position) noexcept {
  if (!unit.slabs[position]) {
    return;
  }
  if (unit.works[position]) {
    unit.works[position]->settle(); // it writes to the slab; the next one says if it failed
    unit.works[position] = nullptr;
  }
  const layout::Bucket& bucket = table_.bucket(unit.buckets[position]).layout;
  bool lent = false;
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    memory::SlabView& view = table_.entry(bucket.parameters[i]).view;
    lent = view.take_lent() || lent;
    view.release(unit.messages[position][i], &unit);
  }
  memory::Slab slab = std::exchange(unit.slabs[position], {});
  if (lent) {
    unit.lent.push_back(std::move(slab));
  } else {
    pool_->give(std::move(slab));
  }
  live_numel_ -= bucket.numel;
}

void ParameterManager::release(int64_t unit) noexcept {
  Unit& released = *units_[unit];
  for (size_t b = 0; b < released.buckets.size(); ++b) {
    release_bucket(released, b);
  }
  released.state = State::sharded;
  released.kept = false;
}

bool ParameterManager::needed(const Unit& unit) {
  return unit.entered > 0 || unit.held > 0 || unit.pins > 0;
}

void ParameterManager::release_unless_needed(int64_t unit) noexcept {
  const Unit& held = *units_[unit];
  if (!needed(held) && !held.kept && !held.restored) {
    release(unit);
  }
}

} // namespace zero::sharding
