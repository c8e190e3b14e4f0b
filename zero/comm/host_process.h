#pragma once

// Processes of one host: what identifies one, and whether it still runs.

#include <cstdint>
#include <string>

namespace zero::comm {

struct HostProcess {
  std::string host; // equal for processes that can see each other's /proc entries
  int64_t pid = 0;
  uint64_t start_time = 0; // clock ticks since boot; tells a reused pid apart

  bool same_process(const HostProcess& other) const {
    return pid == other.pid && start_time == other.start_time && host == other.host;
  }
};

HostProcess this_process();

// False once it has exited or was killed, also while its parent has not noticed.
bool is_running(const HostProcess& process);

} // namespace zero::comm
