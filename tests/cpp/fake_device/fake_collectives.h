#pragma once

// One collective of a fake backend: what each rank queued, and what happens when all have.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "machine.h"

namespace zero::fake {

// A part of a collective; several where calls are coalesced. Equal on all ranks but for
// the pointers and the splits.
struct Part {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t count = 0; // elements: of a shard, of a tensor; 0 for all-to-all, which differs
  c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM;
  int64_t root = 0;
  const char* input = nullptr;
  char* output = nullptr;
  // all-to-all: elements to and from each rank
  std::vector<int64_t> sends;
  std::vector<int64_t> receives;
};

std::string text_of(const Part& part);

// Writes all outputs. `ranks[r]` is rank r's; throws where all-to-all splits don't fit.
void move_data(const std::vector<const Part*>& ranks);

struct Queued {
  std::vector<Part> parts;
  PendingList after; // what the rank's stream had queued before
  Ranges ranges;
  const StreamState* stream = nullptr;
};

class Collective final : public Pending {
 public:
  Collective(int64_t sequence, int64_t size) : sequence_(sequence), ranks_(size) {}

  // With the machine's mutex held. Throws where it does not match a peer's: the peers get
  // that error too.
  void queue_locked(int64_t rank, Queued call);
  void fail_locked(const std::string& why) override;
  // Does it if all have queued it and what comes before is done.
  bool try_to_run_locked();
  std::string missing() const override;

 private:
  void finish_locked();

  const int64_t sequence_;
  std::vector<std::unique_ptr<Queued>> ranks_;
};

// Where the backends of a group's ranks meet.
class Meeting {
 public:
  explicit Meeting(int64_t size) : size_(size) {}
  // Each rank asks once.
  std::shared_ptr<Collective> collective_locked(int64_t sequence);
  // After a rank has queued something: runs what can run, of all groups.
  static void progress_locked();

 private:
  const int64_t size_;
  struct Open {
    std::shared_ptr<Collective> collective;
    int64_t arrivals = 0;
  };
  std::map<int64_t, Open> open_; // until all ranks have come
};

} // namespace zero::fake
