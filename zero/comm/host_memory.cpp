#include <zero/comm/host_memory.h>

#include <sys/prctl.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>
#include <utility>

namespace zero::comm {
namespace {

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
    : processes_(std::move(processes)) {
  for (const HostProcess& process : processes_) {
    in_place_.push_back(process.same_process(processes_[rank]));
  }
}

bool HostMemory::can_read(const std::vector<Probe>& probes) const {
  for (size_t rank = 0; rank < probes.size(); ++rank) {
    if (in_place_[rank]) {
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

const char* HostMemory::view(int64_t rank, uint64_t address, int64_t bytes, char* scratch) const {
  if (in_place_[rank]) {
    return pointer(address);
  }
  read_process(processes_[rank].pid, address, bytes, scratch);
  return scratch;
}

void HostMemory::copy(int64_t rank, uint64_t address, int64_t bytes, char* to) const {
  if (bytes == 0) {
    return;
  }
  if (in_place_[rank]) {
    std::memcpy(to, pointer(address), static_cast<size_t>(bytes));
  } else {
    read_process(processes_[rank].pid, address, bytes, to);
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
