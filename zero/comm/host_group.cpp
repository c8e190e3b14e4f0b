#include <zero/comm/host_group.h>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <exception>
#include <sstream>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <zero/comm/meeting.h>

namespace zero::comm {
namespace {

constexpr int64_t kHeaderWords = sizeof(OperationHeader) / sizeof(uint64_t);

// Read by the peers to see whether they can.
const uint64_t probe_value = 0x5a45524f50524f42;

// What ranks tell each other first, a line each.
struct Introduction {
  HostProcess process;
  uint64_t user = 0;
  HostMemory::Probe probe;

  std::string text() const {
    std::ostringstream out;
    out << process.host << "\n"
        << process.pid << " " << process.start_time << " " << user << " " << probe.address;
    return out.str();
  }
  static Introduction parse(const std::string& text) {
    Introduction result;
    std::istringstream in(text);
    std::getline(in, result.process.host);
    in >> result.process.pid >> result.process.start_time >> result.user >> result.probe.address;
    result.probe.expected = probe_value;
    return result;
  }
};

std::string different_host(const std::vector<Introduction>& all) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto& process = all[rank].process;
    if (process.host != all[0].process.host || process.host.front() == ' ') {
      return "rank " + std::to_string(rank) +
          " runs on another host or in another container than "
          "rank 0";
    }
    if (all[rank].user != all[0].user) {
      return "rank " + std::to_string(rank) + " runs as another user than rank 0";
    }
  }
  return {};
}

bool several_processes(const std::vector<Introduction>& all) {
  return std::any_of(all.begin(), all.end(), [&](const Introduction& other) {
    return !other.process.same_process(all[0].process);
  });
}

} // namespace

OperationHeader load_header(const OperationHeader& shared) {
  OperationHeader header;
  auto* to = reinterpret_cast<uint64_t*>(&header);
  auto* from = reinterpret_cast<uint64_t*>(const_cast<OperationHeader*>(&shared));
  for (int64_t i = 0; i < kHeaderWords; ++i) {
    to[i] = std::atomic_ref<uint64_t>(from[i]).load(std::memory_order_relaxed);
  }
  return header;
}

void store_header(OperationHeader& shared, const OperationHeader& header) {
  auto* to = reinterpret_cast<uint64_t*>(&shared);
  const auto* from = reinterpret_cast<const uint64_t*>(&header);
  for (int64_t i = 0; i < kHeaderWords; ++i) {
    std::atomic_ref<uint64_t>(to[i]).store(from[i], std::memory_order_relaxed);
  }
}

HostGroup::HostGroup(
    std::shared_ptr<HostSegment> segment,
    std::vector<HostProcess> processes,
    int64_t rank,
    int64_t channels)
    : segment_(std::move(segment)),
      processes_(std::move(processes)),
      memory_(processes_, rank),
      rank_(rank),
      channels_(channels) {}

std::shared_ptr<HostGroup> HostGroup::connect(
    c10d::Store& store,
    int64_t rank,
    int64_t size,
    int64_t channels,
    double timeout_seconds,
    std::string* why_not,
    bool direct) {
  const auto tell = [&](const std::string& name, const std::string& text) {
    return tell_all(store, name, rank, size, text, timeout_seconds);
  };
  Introduction own;
  own.process = this_process();
  own.user = geteuid();
  own.probe.address = reinterpret_cast<uint64_t>(&probe_value);
  allow_reads_by_peers();
  std::vector<Introduction> all;
  for (const std::string& text : tell("who", own.text())) {
    all.push_back(Introduction::parse(text));
  }
  if (*why_not = different_host(all); !why_not->empty()) {
    return nullptr;
  }

  std::shared_ptr<HostSegment> segment;
  const auto arena = direct && several_processes(all) ? HostArena::create() : nullptr;
  std::string complaint;
  if (rank == 0) {
    try {
      segment = HostSegment::create(size, channels);
    } catch (const std::exception& error) {
      complaint = error.what();
    }
  }
  // The segment's address, which is rank 0's to say, and each rank's arena's.
  const auto addresses = tell(
      "segment",
      (segment ? segment->address() : std::string()) + "\n" + (arena ? arena->address() : ""));
  const auto address = addresses.front().substr(0, addresses.front().find('\n'));
  std::vector<HostProcess> processes;
  std::vector<HostMemory::Probe> probes;
  for (const Introduction& introduction : all) {
    processes.push_back(introduction.process);
    probes.push_back(introduction.probe);
  }
  std::shared_ptr<HostGroup> group;
  if (!address.empty()) {
    try {
      segment = segment ? segment : HostSegment::open(address, size, channels);
      group = std::shared_ptr<HostGroup>(new HostGroup(segment, processes, rank, channels));
      group->staged_ = !direct || !group->memory_.can_read(probes);
      group->map_arenas(arena, addresses);
    } catch (const std::exception& error) {
      complaint = error.what();
    }
  }
  // "+": reads all peers; "-": through windows; else what is wrong.
  const auto verdicts = tell("verdict", group ? (group->staged_ ? "-" : "+") : "no: " + complaint);
  for (int64_t peer = 0; peer < size; ++peer) {
    const std::string& verdict = verdicts[peer];
    if (verdict != "+" && verdict != "-") {
      *why_not = "no shared memory on rank " + std::to_string(peer) + ": " +
          verdict.substr(std::min<size_t>(4, verdict.size()));
      return nullptr;
    }
    group->staged_ = group->staged_ || verdict == "-";
  }
  segment->close_file();
  if (arena) {
    arena->close_file();
  }
  return group;
}

void HostGroup::map_arenas(
    const std::shared_ptr<HostArena>& own,
    const std::vector<std::string>& addresses) {
  arena_ = own;
  for (int64_t peer = 0; peer < size(); ++peer) {
    const std::string address = addresses[peer].substr(addresses[peer].find('\n') + 1);
    if (!memory_.same_process(peer) && !address.empty()) {
      memory_.map_arena(peer, address);
    }
  }
}

bool HostGroup::in_own_process() const {
  return getpid() == processes_[rank_].pid;
}

std::string HostGroup::name(int64_t rank) const {
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(processes_[rank].pid) + ")";
}

std::string HostGroup::activity(int64_t rank) const {
  std::string text;
  for (int64_t channel = 0; channel < channels_; ++channel) {
    const HostSlot& at = slot(rank, channel);
    const int64_t posted = at.posted.load();
    const OperationHeader header = load_header(at.posts[posted % 2].header);
    const bool unchanged = at.posted.load() == posted;
    if (unchanged && posted > at.finished.load() && header.magic == OperationHeader::kMagic) {
      text += (text.empty() ? "in " : ", in ") + describe(header);
    }
  }
  return text;
}

int64_t HostGroup::given_up(int64_t rank) const {
  return segment_->member(rank).failed.load();
}

std::string HostGroup::why(int64_t rank) const {
  std::string text;
  for (const auto& character : segment_->member(rank).why) {
    const char c = character.load(std::memory_order_relaxed);
    if (c == '\0') {
      break;
    }
    text += c;
  }
  return text;
}

void HostGroup::give_up(int64_t epoch, const std::string& why) noexcept {
  if (!in_own_process()) {
    return;
  }
  const std::lock_guard lock(giving_up_); // channels fail at the same time
  HostMember& own = segment_->member(rank_);
  if (own.failed.load() > epoch) {
    return;
  }
  const size_t length = std::min(why.size(), own.why.size() - 1);
  for (size_t i = 0; i < length; ++i) {
    own.why[i].store(why[i], std::memory_order_relaxed);
  }
  own.why[length].store('\0', std::memory_order_relaxed);
  own.failed.store(epoch + 1);
  for (int64_t channel = 0; channel < channels_; ++channel) {
    ring(rank_, channel);
    ring_others(channel);
  }
}

void HostGroup::ring(int64_t rank, int64_t channel) const noexcept {
  HostSlot& at = slot(rank, channel);
  at.bell.fetch_add(1);
  if (at.asleep.load() != 0) {
    syscall(SYS_futex, &at.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void HostGroup::ring_others(int64_t channel) const noexcept {
  for (int64_t rank = 0; rank < size(); ++rank) {
    if (rank != rank_) {
      ring(rank, channel);
    }
  }
}

} // namespace zero::comm
