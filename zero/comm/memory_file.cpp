#include <zero/comm/memory_file.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace zero::comm {

void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

MemoryFile MemoryFile::create(const char* name, int64_t bytes) {
  MemoryFile file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.number() < 0) {
    throw_errno("memfd_create");
  }
  if (ftruncate(file.number(), bytes) != 0 ||
      fcntl(file.number(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_errno("sizing a memfd");
  }
  return file;
}

MemoryFile MemoryFile::open(int64_t process, int number, int64_t bytes, bool writable) {
  const auto path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(number);
  MemoryFile file(::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC));
  if (file.number() < 0) {
    throw std::runtime_error("can't open " + path + ": " + std::strerror(errno));
  }
  struct stat status{};
  if (fstat(file.number(), &status) != 0 || status.st_size != bytes) {
    throw std::runtime_error(path + " is not the memory that was announced");
  }
  return file;
}

void MemoryFile::close() noexcept {
  if (const int number = number_.exchange(-1); number >= 0) {
    ::close(number);
  }
}

} // namespace zero::comm
