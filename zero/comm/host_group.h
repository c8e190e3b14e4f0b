#pragma once

// The ranks of one host that share a segment: who they are, whether they live, what
// they failed of, and how they wake each other. One for each rank, shared by its
// channels. Safe to call from any thread.

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include <zero/comm/host_memory.h>
#include <zero/comm/host_process.h>
#include <zero/comm/host_segment.h>

namespace c10d {
class Store;
} // namespace c10d

namespace zero::comm {

class HostGroup {
 public:
  // Collective over the ranks that share `store`, which must be new to it. Null, and
  // the reason, on every rank alike, where the ranks are not on one host or can't
  // share memory. `direct`: read the peers' memory where the kernel lets us.
  static std::shared_ptr<HostGroup> connect(
      c10d::Store& store,
      int64_t rank,
      int64_t size,
      int64_t channels,
      double timeout_seconds,
      std::string* why_not,
      bool direct = true);

  int64_t rank() const {
    return rank_;
  }
  int64_t size() const {
    return static_cast<int64_t>(processes_.size());
  }
  int64_t channels() const {
    return channels_;
  }
  const HostMemory& memory() const {
    return memory_;
  }
  // Where buffers come from that the others read in place, or null.
  const std::shared_ptr<HostArena>& arena() const {
    return arena_;
  }
  // Bytes travel through windows of the segment: ranks can't read each other.
  bool staged() const {
    return staged_;
  }
  HostSlot& slot(int64_t rank, int64_t channel) const {
    return segment_->slot(rank, channel);
  }
  char* window(int64_t rank, int64_t channel, int64_t which) const {
    return segment_->window(rank, channel, which);
  }

  // False in a forked child, which has a copy of this and must not speak for its
  // parent.
  bool in_own_process() const;
  bool is_running(int64_t rank) const {
    return comm::is_running(processes_[rank]);
  }
  // "rank 1 (pid 4711)"
  std::string name(int64_t rank) const;
  // What a rank does in all channels, by its own posts: "in all_gather of unit 3 at
  // step 7"; empty when it does nothing.
  std::string activity(int64_t rank) const;

  // Failures, by epoch: a rank that failed in epoch e has given up e + 1 epochs.
  int64_t given_up(int64_t rank) const;
  std::string why(int64_t rank) const;
  // This rank's; the first of an epoch counts. Wakes everybody.
  void give_up(int64_t epoch, const std::string& why) noexcept;

  // Wakes a rank that sleeps in await_bell.
  void ring(int64_t rank, int64_t channel) const noexcept;
  void ring_others(int64_t channel) const noexcept;

 private:
  HostGroup(
      std::shared_ptr<HostSegment> segment,
      std::vector<HostProcess> processes,
      int64_t rank,
      int64_t channels);
  void map_arenas(const std::shared_ptr<HostArena>& own, const std::vector<std::string>& addresses);

  const std::shared_ptr<HostSegment> segment_;
  const std::vector<HostProcess> processes_;
  HostMemory memory_;
  std::shared_ptr<HostArena> arena_;
  const int64_t rank_;
  const int64_t channels_;
  bool staged_ = false;
  std::mutex giving_up_;
};

// Copies of what another thread or process may be writing: in atomic words.
OperationHeader load_header(const OperationHeader& shared);
void store_header(OperationHeader& shared, const OperationHeader& header);

} // namespace zero::comm
