#pragma once

// Vector clocks. Agents are the streams and, one for each device, the host: what a clock
// knows of an agent is how many of its operations come before.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zero::fake {

class Clock {
 public:
  bool knows(size_t agent, uint64_t time) const {
    return time == 0 || (agent < times_.size() && times_[agent] >= time);
  }
  uint64_t of(size_t agent) const {
    return agent < times_.size() ? times_[agent] : 0;
  }
  void advance(size_t agent) {
    if (agent >= times_.size()) {
      times_.resize(agent + 1);
    }
    ++times_[agent];
  }
  void join(const Clock& other) {
    times_.resize(std::max(times_.size(), other.times_.size()));
    for (size_t agent = 0; agent < other.times_.size(); ++agent) {
      times_[agent] = std::max(times_[agent], other.times_[agent]);
    }
  }

 private:
  std::vector<uint64_t> times_;
};

} // namespace zero::fake
