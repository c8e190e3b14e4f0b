#pragma once

// The fake devices' state, behind one mutex: streams with their clocks, events, blocks of
// memory with the accesses that later ones have to be ordered after, and the trace.
// Functions whose name ends in _locked are called with the mutex held.

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include "clock.h"
#include "fake_device.h"

namespace zero::fake {

// Work that a stream has queued and that has not happened yet: a collective.
class Pending {
 public:
  virtual ~Pending() = default;
  // What it waits for, for a timeout's error.
  virtual std::string missing() const = 0;
  // Everybody gets this error; data no longer moves.
  virtual void fail_locked(const std::string& why) = 0;
  bool done = false;
  std::string error; // why it failed
};
using PendingList = std::vector<std::shared_ptr<Pending>>;

struct StreamState {
  c10::DeviceIndex device = 0;
  c10::StreamId id = 0;
  bool high_priority = false;
  size_t agent = 0;
  Clock clock;
  PendingList pending;
};

// A point in a stream's work.
struct Point {
  Clock clock;
  PendingList pending;
  int64_t entry = -1; // that recorded it; none: never recorded
};

struct EventState {
  int64_t id = 0;
  c10::DeviceIndex device = 0; // of the stream that recorded it
  Point point;
};

struct Access {
  const char* begin;
  const char* end;
  bool writes;
  size_t agent;
  uint64_t time;
  int64_t number; // of its entry
  const std::string* name;
  c10::DeviceIndex device;
  c10::StreamId stream; // -1: the host
};

struct Block {
  int64_t id = 0;
  char* data = nullptr;
  size_t size = 0; // of its class
  size_t requested = 0;
  c10::DeviceIndex device = 0;
  StreamState* stream = nullptr; // that it was allocated for; null: pinned host memory
  std::vector<Access> accesses;
  std::set<const StreamState*> recorded;
  int64_t pending_uses = 0;
  bool live = true;
  std::string name;
};

struct Ranges {
  std::vector<Range> reads;
  std::vector<Range> writes;
};

// One operation, launched.
struct Ticket {
  int64_t number = -1;
  StreamState* stream = nullptr;
  Clock clock;
  const std::string* name = nullptr;
};

using Lock = std::unique_lock<std::mutex>;

class Machine {
 public:
  static Machine& get();

  Lock lock() {
    return Lock(mutex_);
  }
  void notify_locked() {
    changed_.notify_all();
  }

  // ---- streams and events ----
  StreamState& stream_locked(const c10::Stream& stream);
  StreamState& new_stream_locked(c10::DeviceIndex device, bool high_priority);
  // Blocks, unlocked, until what the stream has queued so far has happened.
  void settle_locked(Lock& lock, const PendingList& pending);
  Point point_locked(StreamState& stream, int64_t event);
  void wait_locked(StreamState& stream, const Point& point, int64_t event);
  EventState* new_event_locked();
  // The host waits. `what` is the call's name.
  void synchronize_locked(
      Lock& lock,
      c10::DeviceIndex device,
      const Point& point,
      const std::string& what,
      int64_t event = -1,
      c10::StreamId stream = 0);
  void refuse_synchronization_locked(c10::DeviceIndex device, const std::string& what);
  Point device_point_locked(c10::DeviceIndex device);
  // The host has seen that it has happened.
  void host_knows_locked(c10::DeviceIndex device, const Point& point);
  static bool is_done(const PendingList& pending);

  // ---- operations ----
  // Waits until the stream's pending work is done, unless `deferred`; checks the ranges.
  Ticket launch_locked(
      Lock& lock,
      StreamState& stream,
      const std::string& name,
      const Ranges& ranges,
      bool deferred = false);
  // More that the operation touches: its new outputs.
  void add_writes_locked(const Ticket& ticket, const std::vector<Range>& writes);
  void host_access_locked(Lock& lock, c10::DeviceIndex device, Range range, bool writes);
  void begin_use_locked(const std::vector<Range>& ranges);
  // Where `failed` it is no error that the blocks are freed without waiting for the stream.
  void end_use_locked(const std::vector<Range>& ranges, const StreamState* stream, bool failed);

  // ---- memory ----
  char* allocate(size_t bytes, c10::DeviceIndex device, StreamState* stream);
  void free(char* data) noexcept;
  void record_stream(const char* data, const c10::Stream& stream, bool ours);
  Block* find_locked(const char* address);
  bool is_pinned(const void* address);
  Memory& memory_locked(c10::DeviceIndex device) {
    return devices_.at(device).memory;
  }

  // ---- trace and errors ----
  Entry& entry_locked(Kind kind, c10::DeviceIndex device, c10::StreamId stream, std::string name);
  void error_locked(const std::string& text) noexcept;
  // Keeps it, and throws it.
  [[noreturn]] void fail_locked(const std::string& text);
  std::string describe_locked(const Range& range);
  std::vector<Entry> entries_locked() const {
    return {entries_.begin(), entries_.end()};
  }
  std::vector<std::string> errors_locked() const {
    return errors_;
  }
  std::vector<std::string> take_errors_locked() {
    return std::exchange(errors_, {});
  }
  void reset_locked();

  double timeout_seconds = 30.0;
  std::array<int, device_count> no_synchronization{};

 private:
  struct DeviceState {
    std::deque<StreamState> streams; // by id
    Clock host;
    size_t host_agent = 0;
    Memory memory;
  };

  Machine();
  void access_locked(const Ticket& ticket, c10::StreamId stream, const Range& range, bool writes);
  void check_locked(
      const Block& block,
      const Access& access,
      const Clock& clock,
      const std::string& who);
  Block* reuse_locked(size_t size, StreamState* stream);
  void mark_allocated_locked(Block& block, size_t bytes);
  void check_free_locked(Block& block);
  void retire_locked(Block& block) noexcept;
  const std::string* intern_locked(const std::string& name);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<DeviceState> devices_;
  size_t agents_ = 0;
  int64_t events_ = 0;
  int64_t numbers_ = 0;
  std::map<uintptr_t, std::unique_ptr<Block>> blocks_; // by address, live and free
  std::map<std::pair<const StreamState*, size_t>, std::vector<Block*>> free_;
  std::deque<Entry> entries_;
  std::vector<std::string> errors_;
  std::unordered_set<std::string> names_;
};

// The device that -1 means.
c10::DeviceIndex resolve(c10::DeviceIndex device);
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
// Of this thread.
c10::StreamId exchange_current_stream(c10::DeviceIndex device, c10::StreamId stream);
const std::string& current_label();

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
// Keeps the first bytes.
void resize_storage(c10::StorageImpl& storage, size_t bytes);
// The bytes between a strided tensor's first element and its last; empty for none.
Range range_of(const at::TensorBase& tensor);

} // namespace zero::fake
