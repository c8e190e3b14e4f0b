#pragma once

// One rank's side of one channel of a HostGroup: it posts operations, waits for the
// others' posts and steps, sleeps on its bell meanwhile, and words what goes wrong.
// Used by one thread at a time; interrupt(), give_up(), broken() and
// behind() by any.

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <system_error>

#include <zero/comm/host_group.h>
#include <zero/comm/transport.h>

namespace zero::comm {

class HostChannel {
 public:
  HostChannel(std::shared_ptr<HostGroup> group, int64_t channel, double timeout_seconds);
  // Tells the peers that this rank's communicator is gone.
  ~HostChannel();
  HostChannel(const HostChannel&) = delete;
  HostChannel& operator=(const HostChannel&) = delete;

  const HostGroup& group() const {
    return *group_;
  }
  int64_t index() const {
    return channel_;
  }
  int64_t rank() const {
    return group_->rank();
  }
  int64_t size() const {
    return group_->size();
  }

  // What this rank puts beside its header: an address, or the bytes themselves.
  struct Content {
    const char* data = nullptr;
    int64_t inline_bytes = 0; // of `data`; 0: its address
    const char* more = nullptr; // travels behind them
    int64_t more_bytes = 0;
  };
  // Opens an operation: returns when all ranks have posted the same one. Its posts
  // can be read until this rank opens the next but one.
  void open(const Opening& opening, const Content& content);
  const HostPost& post_of(int64_t rank) const;
  void finish();
  // After an error: tells the others, and returns when none reads this rank's memory.
  void fail(const std::string& why) noexcept;

  // A step within an operation, counted: this rank has made it; all others have.
  using Counter = std::atomic<int64_t> HostSlot::*;
  void advance(Counter counter);
  void await(Counter counter, int64_t target);
  int64_t count(Counter counter) const {
    return (own_.*counter).load(std::memory_order_relaxed);
  }

  // While it lives, and after check_given_up(), this rank may read memory of the
  // others: they keep it.
  class Reading {
   public:
    explicit Reading(HostChannel& channel) : slot_(channel.own_) {
      slot_.reading.store(1);
    }
    ~Reading() {
      slot_.reading.store(0);
    }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

   private:
    HostSlot& slot_;
  };
  void check_given_up() const;
  // Bytes of a peer; throws naming it.
  const char* view(int64_t peer, uint64_t address, int64_t bytes, char* scratch) const;
  void copy(int64_t peer, uint64_t address, int64_t bytes, char* to) const;

  void interrupt();
  void give_up(const std::string& why) noexcept;
  bool broken() const;
  // Whether a peer has opened more than `submitted` operations of this epoch.
  bool behind(int64_t submitted) const;
  // [collective] The next epoch, once all ranks have come here.
  void recover();

 private:
  using Clock = std::chrono::steady_clock;

  bool arrived(Counter counter, int64_t target) const;
  void compare(bool all) const;
  void check_peers(Counter counter, int64_t target) const;
  void sleep(uint32_t bell) const;
  [[noreturn]] void fail_late(Counter counter, int64_t target) const;
  [[noreturn]] void fail_reading(int64_t peer, const std::system_error& cause) const;
  [[noreturn]] void fail_dead(int64_t peer) const;
  std::string where() const;

  const std::shared_ptr<HostGroup> group_;
  const int64_t channel_;
  const double timeout_seconds_;
  HostSlot& own_;
  std::atomic<int64_t> epoch_ = 0;
  int64_t number_ = 0; // of the operation that is open, or was last
  std::string description_ = "the set-up";
  std::atomic<bool> interrupted_ = false;
};

} // namespace zero::comm
