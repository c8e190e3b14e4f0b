#include <zero/sharding/unit_schedule.h>

#include <algorithm>

namespace zero::sharding {

void UnitSchedule::use(int64_t unit, bool backward, bool enclosed) {
  if (backward != position_.backward) {
    end_pass();
    position_.backward = backward;
  }
  if (position_.current >= 0) {
    next_[position_] = unit;
    if (!backward && !enclosed) {
      before_[unit] = position_.current;
    }
  } else if (!backward) {
    first_uses_.clear();
    used_.assign(used_.size(), false);
  }
  if (!backward) {
    used_.resize(std::max(used_.size(), static_cast<size_t>(unit) + 1));
    if (!used_[unit]) {
      used_[unit] = true;
      first_uses_.push_back(unit);
    }
  }
  position_ = {backward, position_.current, unit};
}

void UnitSchedule::end_pass() {
  if (position_.current >= 0) {
    next_[position_] = -1;
  }
  position_ = {position_.backward, -1, -1};
}

void UnitSchedule::restart() {
  end_pass();
  position_ = {};
}

std::optional<int64_t> UnitSchedule::after(const Position& position) const {
  const auto known = next_.find(position);
  if (known != next_.end()) {
    return known->second >= 0 ? std::make_optional(known->second) : std::nullopt;
  }
  if (position.backward) {
    const auto guess = before_.find(position.current);
    if (guess != before_.end()) {
      return guess->second;
    }
  }
  return std::nullopt;
}

bool UnitSchedule::last(int64_t root) const {
  Position position = position_;
  for (int i = 0; i < 4; ++i) {
    const auto known = next_.find(position);
    if (known == next_.end() || (known->second >= 0 && known->second != root)) {
      return false;
    }
    if (known->second < 0) {
      return true;
    }
    position = {position.backward, position.current, known->second};
  }
  return false;
}

UnitSchedule::Units UnitSchedule::ahead(int64_t count) const {
  Units units;
  Position position = position_;
  // A use of what is in the list already takes no place in it, but a loop ends.
  for (int64_t i = 0; i < 4 * count && static_cast<int64_t>(units.size()) < count; ++i) {
    const std::optional<int64_t> next = after(position);
    if (!next) {
      break;
    }
    if (*next != position_.current && std::find(units.begin(), units.end(), *next) == units.end()) {
      units.push_back(*next);
    }
    position = {position.backward, position.current, *next};
  }
  return units;
}

} // namespace zero::sharding
