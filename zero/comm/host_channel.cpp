#include <zero/comm/host_channel.h>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <exception>
#include <limits>
#include <system_error>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>

#include <zero/comm/error_text.h>
#include <zero/comm/milliseconds.h>

namespace zero::comm {
namespace {

constexpr std::chrono::milliseconds kLookInterval{100}; // for peers that died
constexpr std::chrono::milliseconds kDyingTime{1000};
// Looks at the counters before the thread sleeps: a few microseconds, less than the
// sleep and the wake-up cost, and too short to take a core from anybody.
constexpr int kLooks = 60;

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// The numbers of an epoch's operations and steps are larger than all before.
int64_t base_of(int64_t epoch) {
  return epoch << 40;
}

} // namespace

HostChannel::HostChannel(std::shared_ptr<HostGroup> group, int64_t channel, double timeout_seconds)
    : group_(std::move(group)),
      channel_(channel),
      timeout_seconds_(timeout_seconds),
      own_(group_->slot(group_->rank(), channel)) {}

HostChannel::~HostChannel() {
  if (!group_->in_own_process()) {
    return;
  }
  own_.closed.store(1);
  group_->ring_others(channel_);
}

const HostPost& HostChannel::post_of(int64_t rank) const {
  return group_->slot(rank, channel_).posts[number_ % 2];
}

void HostChannel::open(const Opening& opening, const Content& content) {
  description_ = opening.description;
  ++number_;
  HostPost& post = own_.posts[number_ % 2];
  OperationHeader header = opening.header;
  header.sequence = number_;
  store_header(post.header, header);
  post.address = reinterpret_cast<uint64_t>(content.data);
  post.more_bytes = content.more_bytes;
  if (content.inline_bytes > 0) {
    std::memcpy(post.inline_bytes.data(), content.data, content.inline_bytes);
  }
  if (content.more_bytes > 0) {
    std::memcpy(post.inline_bytes.data() + content.inline_bytes, content.more, content.more_bytes);
  }
  own_.posted.store(number_);
  group_->ring_others(channel_);
  try {
    await(&HostSlot::posted, number_);
  } catch (...) {
    // A rank that went elsewhere explains a rank that did not come.
    compare(/*all=*/false);
    throw;
  }
  compare(/*all=*/true);
}

void HostChannel::finish() {
  own_.finished.store(number_);
}

// In rank order, so that every rank finds the same two to name.
void HostChannel::compare(bool all) const {
  OperationHeader first;
  int64_t first_rank = -1;
  for (int64_t rank = 0; rank < size(); ++rank) {
    const bool posted = group_->slot(rank, channel_).posted.load() >= number_;
    const OperationHeader header = load_header(post_of(rank).header);
    if (!all && (!posted || header.sequence != number_)) {
      continue; // not there yet
    }
    if (first_rank < 0) {
      first = header;
      first_rank = rank;
    }
    TORCH_CHECK_WITH(
        DistBackendError,
        same_operation(first, header),
        "[zero.comm] ",
        describe_mismatch(first_rank, first, rank, header));
  }
}

void HostChannel::advance(Counter counter) {
  (own_.*counter).fetch_add(1);
  group_->ring_others(channel_);
}

bool HostChannel::arrived(Counter counter, int64_t target) const {
  for (int64_t peer = 0; peer < size(); ++peer) {
    if (peer != rank() && (group_->slot(peer, channel_).*counter).load() < target) {
      return false;
    }
  }
  return true;
}

void HostChannel::await(Counter counter, int64_t target) {
  for (int look = 0; look < kLooks; ++look) {
    if (arrived(counter, target)) {
      check_given_up();
      return;
    }
    pause_core();
  }
  const auto deadline = Clock::now() + to_milliseconds(timeout_seconds_);
  auto next_look = Clock::now() + kLookInterval;
  while (true) {
    const uint32_t bell = own_.bell.load();
    own_.asleep.store(1);
    const bool here = arrived(counter, target);
    check_given_up();
    if (here) {
      own_.asleep.store(0);
      return;
    }
    sleep(bell);
    const auto now = Clock::now();
    if (now >= next_look) {
      check_peers(counter, target);
      next_look = now + kLookInterval;
    }
    if (now >= deadline && !arrived(counter, target)) {
      fail_late(counter, target);
    }
  }
}

// Until the bell rings, or for as long as a look is due.
void HostChannel::sleep(uint32_t bell) const {
  const timespec interval{0, std::chrono::nanoseconds(kLookInterval).count()};
  syscall(SYS_futex, &own_.bell, FUTEX_WAIT, bell, &interval, nullptr, 0);
}

std::string HostChannel::where() const {
  return c10::str("in ", description_, ", rank ", rank(), " of ", size());
}

// A peer that gave up in this operation, or before it, may have freed what this rank
// reads. One that had finished it knows that this rank had read it all.
void HostChannel::check_given_up() const {
  const int64_t epoch = epoch_.load();
  TORCH_CHECK_WITH(
      DistBackendError,
      !interrupted_.load(),
      "[zero.comm] rank ",
      rank(),
      " of ",
      size(),
      " closed its communicator during ",
      description_,
      "; an optimizer or a module was destroyed before its operations were done");
  for (int64_t i = 0; i < size(); ++i) {
    const int64_t peer = (rank() + 1 + i) % size(); // this rank last: its own may be an echo
    const bool gave_up = group_->given_up(peer) > epoch;
    TORCH_CHECK_WITH(
        DistBackendError,
        !gave_up || group_->slot(peer, channel_).finished.load() >= number_,
        "[zero.comm] rank ",
        peer,
        " gave up: ",
        without_prefix(first_line(group_->why(peer))),
        " (",
        where(),
        ")");
  }
}

void HostChannel::check_peers(Counter counter, int64_t target) const {
  for (int64_t peer = 0; peer < size(); ++peer) {
    const HostSlot& slot = group_->slot(peer, channel_);
    if (peer == rank() || (slot.*counter).load() >= target) {
      continue;
    }
    const bool gone = slot.closed.load() != 0;
    const bool dead = !group_->is_running(peer);
    if ((slot.*counter).load() >= target) {
      continue; // it came, and left
    }
    if (dead) {
      fail_dead(peer);
    }
    TORCH_CHECK_WITH(
        DistBackendError,
        !gone,
        "[zero.comm] ",
        group_->name(peer),
        " closed its communicator before ",
        description_,
        " (rank ",
        rank(),
        " of ",
        size(),
        " was waiting); it ended or failed first: see its own error",
        kUnevenData);
  }
}

void HostChannel::fail_dead(int64_t peer) const {
  TORCH_CHECK_WITH(
      DistBackendError,
      false,
      "[zero.comm] ",
      group_->name(peer),
      " died during ",
      description_,
      " (rank ",
      rank(),
      " of ",
      size(),
      " was waiting); see its own output, or the kernel's log if it ran out of memory",
      kUnevenData);
}

void HostChannel::fail_late(Counter counter, int64_t target) const {
  int64_t late = rank() == 0 ? 1 : 0; // if all came just now
  for (int64_t peer = 0; peer < size(); ++peer) {
    if (peer != rank() && (group_->slot(peer, channel_).*counter).load() < target) {
      late = peer;
      break;
    }
  }
  std::string meanwhile;
  for (int64_t peer = 0; peer < size(); ++peer) {
    const std::string activity = peer == rank() ? std::string() : group_->activity(peer);
    if (!activity.empty()) {
      meanwhile += "; meanwhile on rank " + std::to_string(peer) + ": " + activity;
    }
  }
  TORCH_CHECK_WITH(
      DistBackendError,
      false,
      "[zero.comm] rank ",
      late,
      counter == &HostSlot::posted ? " did not take part in " : " stopped answering in ",
      description_,
      " within ",
      timeout_seconds_,
      " s (rank ",
      rank(),
      " of ",
      size(),
      " was waiting, the process of ",
      group_->name(late),
      " runs)",
      meanwhile,
      "; see whether rank ",
      late,
      " failed, is stuck or takes another path, or raise the timeout",
      kUnevenData);
}

const char* HostChannel::view(int64_t peer, uint64_t address, int64_t bytes, char* scratch) const {
  try {
    return group_->memory().view(peer, address, bytes, scratch);
  } catch (const std::system_error& error) {
    fail_reading(peer, error);
  }
}

void HostChannel::copy(int64_t peer, uint64_t address, int64_t bytes, char* to) const {
  try {
    group_->memory().copy(peer, address, bytes, to);
  } catch (const std::system_error& error) {
    fail_reading(peer, error);
  }
}

// A process that ends loses its memory first; it is seen to be gone when all of that
// has been freed, which can take seconds.
void HostChannel::fail_reading(int64_t peer, const std::system_error& cause) const {
  const auto deadline = Clock::now() + kDyingTime;
  while (Clock::now() < deadline) {
    check_given_up();
    if (cause.code().value() == ESRCH) {
      fail_dead(peer);
    }
    // Any peer, also one that has read all that it wanted.
    check_peers(&HostSlot::taken, std::numeric_limits<int64_t>::max());
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  TORCH_CHECK_WITH(
      DistBackendError,
      false,
      "[zero.comm] expected to read the memory of ",
      group_->name(peer),
      ", got an error (",
      where(),
      "); use transport=\"group\": ",
      cause.what());
}

void HostChannel::fail(const std::string& why) noexcept {
  own_.asleep.store(0);
  group_->give_up(epoch_.load(), why);
  for (int64_t peer = 0; peer < size(); ++peer) {
    // Threads of this process read in place; for others the kernel reads.
    while (peer != rank() && group_->memory().same_process(peer) &&
           group_->slot(peer, channel_).reading.load() != 0) {
      std::this_thread::yield();
    }
  }
}

void HostChannel::give_up(const std::string& why) noexcept {
  group_->give_up(epoch_.load(), why);
}

void HostChannel::interrupt() {
  interrupted_.store(true);
  own_.closed.store(1); // operations that the user keeps may keep this alive
  group_->ring(rank(), channel_);
  group_->ring_others(channel_);
}

bool HostChannel::behind(int64_t submitted) const {
  for (int64_t peer = 0; peer < size(); ++peer) {
    if (group_->slot(peer, channel_).posted.load() > base_of(epoch_.load()) + submitted) {
      return true;
    }
  }
  return false;
}

bool HostChannel::broken() const {
  const int64_t epoch = epoch_.load();
  for (int64_t peer = 0; peer < size(); ++peer) {
    if (group_->given_up(peer) > epoch) {
      return true;
    }
  }
  return false;
}

void HostChannel::recover() {
  description_ = "the recovery from an error";
  group_->give_up(epoch_.load(), "another rank gave up");
  const int64_t next = group_->given_up(rank());
  number_ = base_of(next);
  epoch_.store(next);
  own_.entered.store(next);
  group_->ring_others(channel_);
  await(&HostSlot::entered, next);
  // Not before: until they entered, the others may wait for this rank's old steps.
  for (const Counter counter :
       {&HostSlot::posted, &HostSlot::staged, &HostSlot::taken, &HostSlot::finished}) {
    (own_.*counter).store(base_of(next));
  }
}

} // namespace zero::comm
