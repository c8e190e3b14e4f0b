#include <zero/comm/host_process.h>

#include <unistd.h>

#include <array>
#include <fstream>
#include <sstream>

namespace zero::comm {
namespace {

struct Stat {
  char state = '\0'; // of /proc/<pid>/stat; 0: there is no such process
  uint64_t flags = 0;
  uint64_t start_time = 0;
};

// Of the kernel's flags: it has begun to exit. Until it has freed its memory, which
// can take seconds, the state still is that of a running process.
constexpr uint64_t kExiting = 0x4;

Stat stat_of(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  // The second field is the name, in parentheses, which may hold anything.
  const auto name_end = text.rfind(')');
  if (name_end == std::string::npos) {
    return {};
  }
  std::istringstream fields(text.substr(name_end + 1));
  Stat stat;
  fields >> stat.state;
  std::string skipped;
  const auto skip = [&](int count) {
    for (int i = 0; i < count; ++i) {
      fields >> skipped;
    }
  };
  skip(5); // state is field 3
  fields >> stat.flags; // field 9
  skip(12);
  fields >> stat.start_time; // field 22
  return stat;
}

std::string link_target(const char* path) {
  std::array<char, 256> target{};
  const auto length = readlink(path, target.data(), target.size());
  return length > 0 ? std::string(target.data(), static_cast<size_t>(length)) : std::string();
}

} // namespace

HostProcess this_process() {
  HostProcess process;
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  std::getline(boot, boot_id);
  process.host = boot_id + " " + link_target("/proc/self/ns/pid");
  process.pid = getpid();
  process.start_time = stat_of(process.pid).start_time;
  return process;
}

bool is_running(const HostProcess& process) {
  const Stat stat = stat_of(process.pid);
  return stat.state != '\0' && stat.state != 'Z' && stat.state != 'X' &&
      (stat.flags & kExiting) == 0 && stat.start_time == process.start_time;
}

} // namespace zero::comm
