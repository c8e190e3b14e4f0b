#pragma once

// ParameterManager (stage 3): the life of every unit of parameters. Sharded,
// a unit's parameters have no data; used, the unit is gathered from all ranks'
// shards into a slab, and released when others are used. Uses come from module
// hooks (enter, leave), or from the on-use guard, which sees an operation that is
// about to read a parameter without data. All ranks use units in the same order;
// what is gathered ahead and released follows from that order alone.

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <zero/comm/communicator.h>
#include <zero/memory/slab_pool.h>
#include <zero/sharding/host_shards.h>
#include <zero/sharding/unit_schedule.h>

namespace zero::sharding {

class ParameterManager {
 public:
  // `inside_backward`: whether this thread runs one. `before_use()` is called before
  // units are used, outside any lock.
  ParameterManager(
      const Options& options,
      ParameterTable& table,
      std::shared_ptr<comm::Communicator> communicator,
      std::shared_ptr<memory::SlabPool> pool,
      std::function<bool()> inside_backward,
      std::function<void()> before_use);
  // Starts no transfer: parameters stay without data, with a message.
  ~ParameterManager();
  ParameterManager(const ParameterManager&) = delete;
  ParameterManager& operator=(const ParameterManager&) = delete;

  // The table grew, or has units that are known by name.
  void grow(const std::vector<std::string>& names);
  // Also gather for operations without grad mode outside any module hook.
  void set_gather_always(bool always);

  // Around a forward of a unit's module [collective]; nested calls are counted.
  void enter(int64_t unit);
  void leave(int64_t unit) noexcept;
  // Around any code whose operations may gather, as a forward's.
  void enter_forward();
  void leave_forward() noexcept;

  // Called before each gather of a bucket, under the manager's lock.
  using GatherNotice = std::function<void(int64_t bucket, int64_t step, bool training)>;
  void on_gather(GatherNotice notice);
  // With offload="parameters": a bucket's shard, just made, goes to the host; and before
  // shards are written to, the host waits until no gather reads them.
  void take_shard(int64_t bucket);
  void settle_shards();

  // All gradients of a bucket have come.
  void gradients_complete(int64_t bucket);
  void end_backward();
  // Before parameters change: everything is released. Throws while something is
  // held.
  void before_step();
  // Throws while units are held to be written to, whose values would go over a step's.
  void refuse_writable() const;

  // After a failure of communication: nothing is on its way, what is not held is
  // sharded, and the order of uses is forgotten.
  void discard();

  // Keeps units whole until let_go(), once for each hold() [collective]. `writable`:
  // operations may write to them; store() takes this rank's part of what was
  // written.
  void hold(const std::vector<int64_t>& units, bool writable);
  void store(int64_t unit);
  void let_go(const std::vector<int64_t>& units, bool writable) noexcept;
  // Memory of the parameter's own that may be written, of which this rank's part
  // is taken at the end: no communication.
  void begin_load(int64_t index);
  void end_load(int64_t index);
  // A parameter keeps its whole value for good, in memory of its own [collective].
  void restore(int64_t unit);

  // Buckets in the order in which backward is expected to complete them.
  std::vector<int64_t> backward_order() const;
  int64_t unit_count() const {
    return static_cast<int64_t>(units_.size());
  }
  const std::string& name(int64_t unit) const;
  bool whole(int64_t unit) const;

 private:
  // Partly: buckets were gathered, are on their way or were let go already.
  enum class State : uint8_t { sharded, partly, whole };
  class Unit final : public memory::OnUse {
   public:
    Unit(ParameterManager& manager, int64_t index) : manager_(manager), index_(index) {}
    bool before_use(const char* operation) noexcept override;
    void before_view(const char* /*operation*/) noexcept override {}
    void while_open() noexcept override;
    void before_write(const c10::StorageImpl* storage, const char* operation) noexcept override;
    void pin() noexcept override {
      ++pins;
    }
    void unpin() noexcept override {
      --pins;
    }

    std::string name;
    std::vector<int64_t> buckets;
    std::vector<std::vector<std::string>> messages; // of its parameters, by bucket
    std::vector<std::string> whats; // by bucket, for errors
    State state = State::sharded;
    int64_t numel = 0;
    int64_t entered = 0;
    int64_t held = 0;
    int64_t writable = 0;
    bool listed = false; // among those gathered
    bool kept = false; // not released for others
    bool restored = false; // no longer managed
    std::atomic<int64_t> pins = 0;
    std::vector<memory::Slab> slabs; // by bucket
    std::vector<comm::WorkPtr> works; // by bucket: on its way
    std::vector<memory::Slab> lent; // arrays that the user took keep them

   private:
    ParameterManager& manager_;
    int64_t index_;
  };

  // A unit that is used again this soon stays.
  static constexpr int64_t kNear = 2;
  static bool contains(c10::ArrayRef<int64_t> items, int64_t item) {
    return std::find(items.begin(), items.end(), item) != items.end();
  }

  void use(int64_t unit, bool backward);
  void make_room(int64_t unit, const UnitSchedule::Units& soon);
  void start(int64_t unit, bool training);
  using Positions = c10::SmallVector<size_t, 4>; // of buckets in a unit
  void gather(Unit& unit, const Positions& positions, bool training);
  void land(int64_t unit);
  void release(int64_t unit) noexcept;
  void release_bucket(Unit& unit, size_t position) noexcept;
  void release_unless_needed(int64_t unit) noexcept;
  static bool needed(const Unit& unit);
  std::vector<comm::WorkPtr> start_gathers(std::vector<comm::Gather> gathers);
  bool gathers_now(bool backward) const;
  void check_process() const;
  void fail(int64_t unit, const char* operation, const std::string& cause) noexcept;
  void refuse_write(int64_t unit, const c10::StorageImpl* storage, const char* operation) noexcept;
  std::string message_of(int64_t index) const;
  template <typename Visit>
  void each_parameter(int64_t unit, Visit visit) {
    for (const int64_t bucket : units_[unit]->buckets) {
      for (const int64_t index : table_.bucket(bucket).layout.parameters) {
        visit(index);
      }
    }
  }

  const int64_t prefetch_;
  const int64_t max_live_numel_;
  const std::string reshard_;
  ParameterTable& table_;
  std::shared_ptr<comm::Communicator> communicator_;
  std::shared_ptr<memory::SlabPool> pool_;
  std::function<bool()> inside_backward_;
  std::function<void()> before_use_;
  GatherNotice on_gather_;
  const std::unique_ptr<HostShards> host_; // with offload="parameters"
  const int64_t process_; // a forked child must not gather with its parent's peers

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<int64_t> gathered_; // and what was released since the last look
  struct Load {
    int64_t index;
    memory::FlatBuffer scratch;
    int64_t depth;
  };
  std::vector<Load> loads_;
  UnitSchedule schedule_;
  int64_t live_numel_ = 0;
  int64_t steps_ = 0;
  std::atomic<int64_t> depth_ = 0; // of forwards that hooks told of
  std::atomic<bool> always_ = false;
  std::atomic<int64_t> last_used_ = -1;
};

} // namespace zero::sharding
