#pragma once

// UnitSchedule: the order in which units are used, learned from the uses
// themselves. What followed a pair of uses last time is expected to follow it
// again, so loops, units used twice and a changed order need no special care: a
// wrong guess costs one gather and is forgotten. Before the first backward its
// order is guessed as the reverse of forward. Integers only; equal uses give
// equal guesses, so ranks that use units alike gather them alike.

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include <c10/util/SmallVector.h>

namespace zero::sharding {

class UnitSchedule {
 public:
  using Units = c10::SmallVector<int64_t, 8>;

  // A unit is used now, in a forward or a backward. `enclosed`: by the forward of
  // the unit used before it, which stays whole meanwhile.
  void use(int64_t unit, bool backward, bool enclosed);
  // The pass is over: nothing follows the last use.
  void end_pass();
  // A step has changed the parameters: what is used next starts a new iteration.
  void restart();

  // Units that are expected next in this pass, at most `count`, without repeats.
  Units ahead(int64_t count) const;
  // Whether the pass is known to end after this use, but for uses of the root.
  bool last(int64_t root) const;
  // Units by their first use in the last forward.
  const std::vector<int64_t>& forward_order() const {
    return first_uses_;
  }

 private:
  struct Position {
    bool backward = false;
    int64_t previous = -1;
    int64_t current = -1;
    bool operator==(const Position&) const = default;
  };
  struct Hash {
    size_t operator()(const Position& position) const {
      constexpr uint64_t kSpread = 0x9e3779b97f4a7c15; // 2^64 / golden ratio
      const auto pair = static_cast<uint64_t>(position.previous + 1) << 32 |
          static_cast<uint64_t>(position.current + 1);
      return (2 * pair + static_cast<uint64_t>(position.backward)) * kSpread >> 8;
    }
  };
  std::optional<int64_t> after(const Position& position) const;

  Position position_;
  std::unordered_map<Position, int64_t, Hash> next_; // -1: the pass ends
  std::unordered_map<int64_t, int64_t> before_; // in forward
  std::vector<int64_t> first_uses_;
  std::vector<bool> used_; // by unit: whether it is among the first uses
};

} // namespace zero::sharding
