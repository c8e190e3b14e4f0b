#include <zero/comm/host_memory.h>

#include <sys/prctl.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>
#include <utility>

namespace zero::comm {
namespace {

constexpr int64_t kCopied = int64_t{1} << 20; // at a time: see PeerArena::reading

void read_process(int64_t pid, uint64_t address, int64_t bytes, char* to) {
  int64_t done = 0;
  while (done < bytes) {
    const iovec local{to + done, static_cast<size_t>(bytes - done)};
    const iovec remote{
        reinterpret_cast<void*>(address + done), // NOLINT(performance-no-int-to-ptr)
        static_cast<size_t>(bytes - done)};
    const auto count = process_vm_readv(static_cast<pid_t>(pid), &local, 1, &remote, 1, 0);
    if (count <= 0) {
      if (count < 0 && errno == EINTR) {
        continue;
      }
      throw std::system_error(
          count < 0 ? errno : EFAULT, std::generic_category(), "process_vm_readv");
    }
    done += count;
  }
}

const char* pointer(uint64_t address) {
  return reinterpret_cast<const char*>(address); // NOLINT(performance-no-int-to-ptr)
}

} // namespace

HostMemory::HostMemory(std::vector<HostProcess> processes, int64_t rank)
    : processes_(std::move(processes)), arenas_(processes_.size()) {
  for (const HostProcess& process : processes_) {
    same_process_.push_back(process.same_process(processes_[rank]));
  }
}

void HostMemory::map_arena(int64_t rank, const std::string& address) {
  try {
    arenas_[rank] = std::make_unique<PeerArena>(processes_[rank].pid, address);
  } catch (const std::runtime_error&) { // its bytes are copied, then
  }
}

bool HostMemory::can_read(const std::vector<Probe>& probes) const {
  for (size_t rank = 0; rank < probes.size(); ++rank) {
    if (same_process_[rank]) {
      continue;
    }
    uint64_t found = 0;
    try {
      read_process(
          processes_[rank].pid,
          probes[rank].address,
          sizeof(found),
          reinterpret_cast<char*>(&found));
    } catch (const std::system_error&) {
      return false;
    }
    if (found != probes[rank].expected) {
      return false;
    }
  }
  return true;
}

const char* HostMemory::in_place(int64_t rank, uint64_t address, int64_t bytes) const {
  if (same_process_[rank]) {
    return pointer(address);
  }
  PeerArena* const arena = arenas_[rank].get();
  const char* const data = arena == nullptr ? nullptr : arena->find(address, bytes);
  if (data != nullptr) {
    arena->reading(bytes);
  }
  return data;
}

const char* HostMemory::view(int64_t rank, uint64_t address, int64_t bytes, char* scratch) const {
  if (const char* const data = in_place(rank, address, bytes)) {
    return data;
  }
  read_process(processes_[rank].pid, address, bytes, scratch);
  return scratch;
}

void HostMemory::copy(int64_t rank, uint64_t address, int64_t bytes, char* to) const {
  for (int64_t begin = 0; begin < bytes; begin += kCopied) {
    const int64_t length = std::min(kCopied, bytes - begin);
    if (const char* const data = in_place(rank, address + begin, length)) {
      std::memcpy(to + begin, data, static_cast<size_t>(length));
    } else {
      read_process(processes_[rank].pid, address + begin, length, to + begin);
    }
  }
}

void HostMemory::rest() const {
  for (const auto& arena : arenas_) {
    if (arena) {
      arena->rest();
    }
  }
}

void allow_reads_by_peers() {
  std::ifstream yama("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  if (yama >> scope && scope == 1) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  }
}

} // namespace zero::comm
