#pragma once

// A device without hardware, for tests of what runs on streams. Tensors on
// device(index) (c10::DeviceType::PrivateUse1, 4 of them) lie in host memory and
// operations run at once in the calling thread, but each is recorded as work of the
// current stream, and what no stream, event or synchronization orders is an error:
// accesses of the same bytes, frees of memory that another stream still uses, and, on
// request, calls that make the host wait. See docs/hacking.md.
//
// Host threads of one device count as one: a test gives each rank a device of its own.
// Functions that take a device index mean the calling thread's current device by -1.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/TensorBase.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace zero::fake {

constexpr c10::DeviceIndex device_count = 4;

c10::Device device(c10::DeviceIndex index = 0);

// ---- what happened ----

enum class Kind {
  operation, // of ATen, a kernel, a copy, a collective
  record,
  wait, // a stream for an event
  synchronize, // the host for a stream, an event or a device
  allocate,
  free,
  record_stream, // "not before this stream is done may the block be reused"
};

struct Range {
  const char* begin = nullptr;
  size_t bytes = 0;
};

// Everything in the order of the host's calls.
struct Entry {
  int64_t number = 0;
  Kind kind = Kind::operation;
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;
  std::string name; // of the operation; of a synchronizing call
  std::string label; // of the innermost Label
  int64_t event = -1; // which, of record, wait and synchronize
  int64_t after = -1; // wait, synchronize: the entry that recorded the event
  int64_t block = -1; // which, of allocate, free and record_stream
  size_t bytes = 0; // of the block
  std::vector<Range> reads;
  std::vector<Range> writes;
};

// Since reset().
std::vector<Entry> trace();
// A line each: "12 device 0 stream 3: all_gather [bucket 3] reads ... writes ...".
std::string text_of(const std::vector<Entry>& entries);
// Of operations with this name; with an empty name of all.
std::vector<Entry> operations(const std::string& name, c10::DeviceIndex device = -1);
bool touches(const Entry& entry, const at::TensorBase& tensor);

// Names what the calling thread does meanwhile, in the trace and in errors.
class Label {
 public:
  explicit Label(std::string text);
  Label(const Label&) = delete;
  Label& operator=(const Label&) = delete;
  ~Label();

 private:
  std::string outer_;
};
// Names the block of memory that the tensor lies in, for errors and text_of().
void name_block(const at::TensorBase& tensor, const std::string& name);

// ---- errors ----

// An operation that is not ordered throws, and its text is kept as well; what cannot
// throw (a free) is only kept. A program that ends with errors that nobody took exits
// with 1.
std::vector<std::string> take_errors();
// Throws all errors that were not taken, in one; forgets them.
void check();
// At the start of a test: check(); then the trace is empty and all devices are idle.
void reset();

// ---- the host ----

// What code outside of ATen does with pinned host memory.
void host_reads(const at::TensorBase& tensor);
void host_writes(const at::TensorBase& tensor);

// While it lives, calls that make the host wait for this device throw with their name
// (all devices: -2), in every thread.
class NoSynchronization {
 public:
  explicit NoSynchronization(c10::DeviceIndex device = -1);
  NoSynchronization(const NoSynchronization&) = delete;
  NoSynchronization& operator=(const NoSynchronization&) = delete;
  ~NoSynchronization();

 private:
  std::vector<c10::DeviceIndex> devices_;
};

// How long a call may wait for collectives that a peer has not queued (30 s).
void set_timeout(double seconds);

// ---- streams and memory ----

c10::Stream current_stream(c10::DeviceIndex device = -1);
// Each call gives another one.
c10::Stream new_stream(c10::DeviceIndex device = -1, bool high_priority = false);
bool is_high_priority(const c10::Stream& stream);

struct Memory {
  int64_t bytes = 0; // as asked for
  int64_t peak = 0;
  int64_t allocations = 0; // so far
};
Memory memory(c10::DeviceIndex device = -1);
void reset_peak(c10::DeviceIndex device = -1);

} // namespace zero::fake
