#pragma once

// What the ranks of a join tell each other before each thing that they do together:
// those whose data has not ended what it is, the others that they take part.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <zero/comm/communicator.h>
#include <zero/options.h>

namespace zero::optim {

enum class JoinAction : int32_t {
  joined, // this rank's data has ended
  raised, // this rank was left by an exception; `text` says which
  backward, // one that reduces
  step, // by native rules: `text` has them
  foreign_step, // by somebody else's: `text` has what it needs
  clip_norm,
  clip_value,
  norm,
  norms,
  divide, // gradients
  zero_grad, // to zeros
  buffers, // that follow those of one rank
  synchronize,
  gather, // stage 3: of a bucket
  inspect, // `text` says what; needs no other rank at stage 0
  other, // `text` says what
};

struct JoinMessage {
  JoinAction action = JoinAction::joined;
  std::array<double, 3> arguments = {};
  std::string text = {};
  bool local = false; // has gradients that were not reduced
  int64_t actions = 0; // announced so far
  int64_t zeros = 0; // calls of zero_grad() so far
  std::vector<int64_t> order = {}; // of the launches of buckets, until it is agreed
  std::vector<uint8_t> presence = {}; // by parameter: has a gradient

  bool active() const {
    return action != JoinAction::joined;
  }
};

// One meeting of all ranks.
struct JoinRound {
  std::vector<JoinMessage> messages; // by rank
  std::vector<int64_t> active; // ranks whose data has not ended
  // The rank whose view of gradients the others follow: the first active one, or the
  // first of those that were active last.
  int64_t source = 0;

  bool all_active() const {
    return active.size() == messages.size();
  }
  const JoinMessage& followed() const {
    return messages[source];
  }
  bool any_local() const;
  // Ranks that have or may have something to reduce.
  int64_t contributors() const;
};

// [collective] Throws on all ranks when one was left by an exception, or when two are
// about to do different things, naming them.
JoinRound meet(comm::Communicator& communicator, const JoinMessage& own);

// "clip_grad_norm_"
std::string describe(const JoinMessage& message);

// Rules as the `text` of a step.
std::string pack(const std::vector<Rule>& rules);
std::vector<Rule> unpack(const std::string& text);

} // namespace zero::optim
