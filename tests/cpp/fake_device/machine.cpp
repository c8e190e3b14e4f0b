#include "machine.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace zero::fake {
namespace {

// Errors that no test asked for fail the program.
void exit_with_errors() {
  auto& machine = Machine::get();
  const auto lock = machine.lock();
  const auto errors = machine.errors_locked();
  for (const auto& error : errors) {
    std::fprintf(stderr, "%s\n", error.c_str());
  }
  if (!errors.empty()) {
    std::fflush(nullptr);
    std::_Exit(1);
  }
}

std::string stream_name(c10::DeviceIndex device, c10::StreamId stream) {
  return stream < 0 ? c10::str("the host (device ", int(device), ")")
                    : c10::str("stream ", stream, " of device ", int(device));
}

} // namespace

Machine& Machine::get() {
  static auto* machine = [] {
    auto* made = new Machine; // never destroyed: tensors may be, later
    return made;
  }();
  static const int registered = std::atexit(exit_with_errors);
  (void)registered;
  return *machine;
}

Machine::Machine() : devices_(device_count) {
  for (c10::DeviceIndex index = 0; index < device_count; ++index) {
    devices_[index].host_agent = agents_++;
    new_stream_locked(index, false);
  }
}

// ---- streams and events ----

StreamState& Machine::new_stream_locked(c10::DeviceIndex device, bool high_priority) {
  auto& streams = devices_.at(device).streams;
  StreamState stream;
  stream.device = device;
  stream.id = static_cast<c10::StreamId>(streams.size());
  stream.high_priority = high_priority;
  stream.agent = agents_++;
  streams.push_back(std::move(stream));
  return streams.back();
}

StreamState& Machine::stream_locked(const c10::Stream& stream) {
  return devices_.at(stream.device_index()).streams.at(stream.id());
}

bool Machine::is_done(const PendingList& pending) {
  for (const auto& work : pending) {
    if (!work->done) {
      return false;
    }
  }
  return true;
}

void Machine::settle_locked(Lock& lock, const PendingList& pending) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_seconds);
  const PendingList all = pending; // the stream's may change meanwhile
  for (const auto& work : all) {
    if (!changed_.wait_until(lock, deadline, [&] { return work->done; })) {
      work->fail_locked(
          c10::str("[fake device] waited ", timeout_seconds, " s for ", work->missing()));
      fail_locked(work->error);
    }
    TORCH_CHECK(work->error.empty(), work->error);
  }
}

Point Machine::point_locked(StreamState& stream, int64_t event) {
  Entry& entry = entry_locked(Kind::record, stream.device, stream.id, "record");
  entry.event = event;
  std::erase_if(stream.pending, [](const auto& work) { return work->done && work->error.empty(); });
  return {stream.clock, stream.pending, entry.number};
}

void Machine::wait_locked(StreamState& stream, const Point& point, int64_t event) {
  Entry& entry = entry_locked(Kind::wait, stream.device, stream.id, "wait");
  entry.event = event;
  entry.after = point.entry;
  stream.clock.join(point.clock);
  for (const auto& work : point.pending) {
    if (std::find(stream.pending.begin(), stream.pending.end(), work) == stream.pending.end()) {
      stream.pending.push_back(work);
    }
  }
}

EventState* Machine::new_event_locked() {
  auto* event = new EventState;
  event->id = events_++;
  return event;
}

void Machine::refuse_synchronization_locked(c10::DeviceIndex device, const std::string& what) {
  if (no_synchronization.at(device) > 0) {
    fail_locked(
        c10::str(
            "[fake device] ",
            what,
            " makes the host wait for device ",
            int(device),
            current_label().empty() ? "" : " in " + current_label(),
            ", within NoSynchronization"));
  }
}

void Machine::synchronize_locked(
    Lock& lock,
    c10::DeviceIndex device,
    const Point& point,
    const std::string& what,
    int64_t event,
    c10::StreamId stream) {
  refuse_synchronization_locked(device, what);
  Entry& entry = entry_locked(Kind::synchronize, device, stream, what);
  entry.event = event;
  entry.after = point.entry;
  settle_locked(lock, point.pending);
  host_knows_locked(device, point);
}

Point Machine::device_point_locked(c10::DeviceIndex device) {
  Point point;
  for (const auto& stream : devices_.at(device).streams) {
    point.clock.join(stream.clock);
    point.pending.insert(point.pending.end(), stream.pending.begin(), stream.pending.end());
  }
  return point;
}

void Machine::host_knows_locked(c10::DeviceIndex device, const Point& point) {
  devices_.at(device).host.join(point.clock);
}

// ---- operations ----

const std::string* Machine::intern_locked(const std::string& name) {
  const auto& label = current_label();
  return &*names_.insert(label.empty() ? name : name + " [" + label + "]").first;
}

Ticket Machine::launch_locked(
    Lock& lock,
    StreamState& stream,
    const std::string& name,
    const Ranges& ranges,
    bool deferred) {
  if (!deferred) {
    settle_locked(lock, stream.pending);
    std::erase_if(stream.pending, [](const auto& work) { return work->done; });
  }
  stream.clock.join(devices_.at(stream.device).host);
  stream.clock.advance(stream.agent);
  Entry& entry = entry_locked(Kind::operation, stream.device, stream.id, name);
  entry.reads = ranges.reads;
  entry.writes = ranges.writes;
  const Ticket ticket{entry.number, &stream, stream.clock, intern_locked(name)};
  for (const auto& range : ranges.reads) {
    access_locked(ticket, stream.id, range, false);
  }
  for (const auto& range : ranges.writes) {
    access_locked(ticket, stream.id, range, true);
  }
  return ticket;
}

void Machine::add_writes_locked(const Ticket& ticket, const std::vector<Range>& writes) {
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
    if (entry->number == ticket.number) {
      entry->writes.insert(entry->writes.end(), writes.begin(), writes.end());
      break;
    }
  }
  for (const auto& range : writes) {
    access_locked(ticket, ticket.stream->id, range, true);
  }
}

void Machine::host_access_locked(Lock& lock, c10::DeviceIndex device, Range range, bool writes) {
  (void)lock;
  auto& state = devices_.at(device);
  state.host.advance(state.host_agent);
  const std::string name = writes ? "host writes" : "host reads";
  Entry& entry = entry_locked(Kind::operation, device, -1, name);
  (writes ? entry.writes : entry.reads).push_back(range);
  StreamState host;
  host.device = device;
  host.agent = state.host_agent;
  const Ticket ticket{entry.number, &host, state.host, intern_locked(name)};
  access_locked(ticket, -1, range, writes);
}

void Machine::access_locked(
    const Ticket& ticket,
    c10::StreamId stream,
    const Range& range,
    bool writes) {
  if (range.bytes == 0 || range.begin == nullptr) {
    return;
  }
  Block* block = find_locked(range.begin);
  if (block == nullptr || !block->live) {
    fail_locked(
        c10::str(
            "[fake device] ",
            *ticket.name,
            " (number ",
            ticket.number,
            ") on ",
            stream_name(ticket.stream->device, stream),
            writes ? " writes " : " reads ",
            block == nullptr ? "memory that is no device's" : "memory that was freed: ",
            block == nullptr ? "" : describe_locked(range)));
  }
  const size_t agent = ticket.stream->agent;
  const Access access{
      range.begin,
      range.begin + range.bytes,
      writes,
      agent,
      ticket.clock.of(agent),
      ticket.number,
      ticket.name,
      ticket.stream->device,
      stream};
  check_locked(*block, access, ticket.clock, *ticket.name);
  // Whoever comes after this one comes after what it covers.
  std::erase_if(block->accesses, [&](const Access& old) {
    const bool covered = access.begin <= old.begin && old.end <= access.end;
    return covered && (writes || (!old.writes && old.agent == agent));
  });
  block->accesses.push_back(access);
}

void Machine::check_locked(
    const Block& block,
    const Access& access,
    const Clock& clock,
    const std::string& who) {
  for (const auto& old : block.accesses) {
    const bool overlaps = old.begin < access.end && access.begin < old.end;
    if (!overlaps || (!old.writes && !access.writes) || old.agent == access.agent ||
        clock.knows(old.agent, old.time)) {
      continue;
    }
    const auto here = stream_name(access.device, access.stream);
    const auto there = stream_name(old.device, old.stream);
    const char* begin = std::max(old.begin, access.begin);
    const Range both{begin, static_cast<size_t>(std::min(old.end, access.end) - begin)};
    fail_locked(
        c10::str(
            "[fake device] ",
            who,
            " (number ",
            access.number,
            ") on ",
            here,
            access.writes ? " writes " : " reads ",
            describe_locked(both),
            ", which ",
            *old.name,
            " (number ",
            old.number,
            ") on ",
            there,
            old.writes ? " writes" : " reads",
            ", and nothing orders them: let ",
            here,
            " wait for an event that ",
            there,
            " records after number ",
            old.number));
  }
}

void Machine::begin_use_locked(const std::vector<Range>& ranges) {
  for (const auto& range : ranges) {
    if (Block* block = range.bytes == 0 ? nullptr : find_locked(range.begin)) {
      ++block->pending_uses;
    }
  }
}

void Machine::end_use_locked(
    const std::vector<Range>& ranges,
    const StreamState* stream,
    bool failed) {
  for (const auto& range : ranges) {
    Block* block = range.bytes == 0 ? nullptr : find_locked(range.begin);
    if (block == nullptr) {
      continue;
    }
    if (failed) {
      block->recorded.insert(stream);
    }
    if (--block->pending_uses == 0 && !block->live) {
      retire_locked(*block);
    }
  }
}

} // namespace zero::fake
