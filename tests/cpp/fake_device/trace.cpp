// The trace, errors, and the rest of what tests ask for.

#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "machine.h"

namespace zero::fake {
namespace {

thread_local std::string label;

const char* name_of(Kind kind) {
  switch (kind) {
  case Kind::operation:
    return "operation";
  case Kind::record:
    return "record";
  case Kind::wait:
    return "wait";
  case Kind::synchronize:
    return "synchronize";
  case Kind::allocate:
    return "allocate";
  case Kind::free:
    return "free";
  case Kind::record_stream:
    return "record_stream";
  }
  return "?";
}

std::string line_of(Machine& machine, const Entry& entry) {
  auto line = c10::str(entry.number, " device ", int(entry.device));
  line += entry.stream < 0 ? std::string(" host") : c10::str(" stream ", entry.stream);
  line += c10::str(": ", entry.name);
  if (!entry.label.empty()) {
    line += " [" + entry.label + "]";
  }
  if (entry.kind == Kind::synchronize || entry.kind == Kind::record_stream) {
    line += c10::str(" (", name_of(entry.kind), ")");
  }
  if (entry.event >= 0) {
    line += c10::str(" event ", entry.event);
  }
  if (entry.after >= 0) {
    line += c10::str(" recorded at ", entry.after);
  }
  if (entry.block >= 0) {
    line += c10::str(" block ", entry.block, " of ", entry.bytes, " bytes");
  }
  for (const auto& range : entry.reads) {
    line += " reads " + machine.describe_locked(range);
  }
  for (const auto& range : entry.writes) {
    line += " writes " + machine.describe_locked(range);
  }
  return line + "\n";
}

void host_access(const at::TensorBase& tensor, bool writes) {
  auto& machine = Machine::get();
  auto lock = machine.lock();
  machine.host_access_locked(lock, current_device(), range_of(tensor), writes);
}

} // namespace

// ---- the machine's part ----

Entry&
Machine::entry_locked(Kind kind, c10::DeviceIndex device, c10::StreamId stream, std::string name) {
  Entry entry;
  entry.number = numbers_++;
  entry.kind = kind;
  entry.device = device;
  entry.stream = stream;
  entry.name = std::move(name);
  entry.label = label;
  entries_.push_back(std::move(entry));
  return entries_.back();
}

void Machine::error_locked(const std::string& text) noexcept {
  errors_.push_back(text);
}

void Machine::fail_locked(const std::string& text) {
  error_locked(text);
  TORCH_CHECK(false, text);
}

std::string Machine::describe_locked(const Range& range) {
  const Block* block = range.bytes == 0 ? nullptr : find_locked(range.begin);
  if (block == nullptr) {
    return "nothing";
  }
  const auto begin = range.begin - block->data;
  return c10::str(
      "block ",
      block->id,
      block->name.empty() ? "" : " (" + block->name + ")",
      " bytes ",
      begin,
      " to ",
      begin + static_cast<int64_t>(range.bytes));
}

void Machine::reset_locked() {
  Clock all;
  for (auto& state : devices_) {
    for (auto& stream : state.streams) {
      all.join(stream.clock);
      stream.pending.clear();
    }
    all.join(state.host);
  }
  for (auto& state : devices_) {
    state.host.join(all);
    state.memory.peak = state.memory.bytes;
  }
  entries_.clear();
  errors_.clear();
}

// ---- the tests' part ----

c10::Device device(c10::DeviceIndex index) {
  return {c10::DeviceType::PrivateUse1, index};
}

std::vector<Entry> trace() {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  return machine.entries_locked();
}

std::string text_of(const std::vector<Entry>& entries) {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  std::string text;
  for (const auto& entry : entries) {
    text += line_of(machine, entry);
  }
  return text;
}

std::vector<Entry> operations(const std::string& name, c10::DeviceIndex device) {
  const auto index = resolve(device);
  std::vector<Entry> found = trace();
  std::erase_if(found, [&](const Entry& entry) {
    return entry.kind != Kind::operation || entry.device != index ||
        (!name.empty() && entry.name != name);
  });
  return found;
}

bool touches(const Entry& entry, const at::TensorBase& tensor) {
  const Range wanted = range_of(tensor);
  const auto overlaps = [&](const Range& range) {
    return range.begin < wanted.begin + wanted.bytes && wanted.begin < range.begin + range.bytes;
  };
  return std::any_of(entry.reads.begin(), entry.reads.end(), overlaps) ||
      std::any_of(entry.writes.begin(), entry.writes.end(), overlaps);
}

const std::string& current_label() {
  return label;
}

Label::Label(std::string text) : outer_(std::exchange(label, std::move(text))) {}
Label::~Label() {
  label = std::move(outer_);
}

void name_block(const at::TensorBase& tensor, const std::string& name) {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  Block* block = machine.find_locked(range_of(tensor).begin);
  TORCH_CHECK(block != nullptr, "expected a tensor in the fake device's memory, or pinned");
  block->name = name;
}

std::vector<std::string> take_errors() {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  return machine.take_errors_locked();
}

void check() {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  const auto errors = machine.take_errors_locked();
  TORCH_CHECK(errors.empty(), c10::Join("\n", errors));
}

void reset() {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  const auto errors = machine.take_errors_locked();
  machine.reset_locked();
  TORCH_CHECK(errors.empty(), "left by what ran before: ", c10::Join("\n", errors));
}

void host_reads(const at::TensorBase& tensor) {
  host_access(tensor, false);
}
void host_writes(const at::TensorBase& tensor) {
  host_access(tensor, true);
}

NoSynchronization::NoSynchronization(c10::DeviceIndex device) {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  for (c10::DeviceIndex index = 0; index < device_count; ++index) {
    if (device == -2 || resolve(device) == index) {
      devices_.push_back(index);
      ++machine.no_synchronization.at(index);
    }
  }
}

NoSynchronization::~NoSynchronization() {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  for (const auto index : devices_) {
    --machine.no_synchronization.at(index);
  }
}

void set_timeout(double seconds) {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  machine.timeout_seconds = seconds;
}

bool is_high_priority(const c10::Stream& stream) {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  return machine.stream_locked(stream).high_priority;
}

Memory memory(c10::DeviceIndex device) {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  return machine.memory_locked(resolve(device));
}

void reset_peak(c10::DeviceIndex device) {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  auto& memory = machine.memory_locked(resolve(device));
  memory.peak = memory.bytes;
}

} // namespace zero::fake
