#pragma once

// Anonymous files that processes of one host share (memfd): they have no name, take no
// space of /dev/shm and end with the last process that has them.

#include <atomic>
#include <cstdint>
#include <string>

namespace zero::comm {

// Throws std::system_error of errno.
[[noreturn]] void throw_errno(const std::string& what);

// An open one; closed with the object.
class MemoryFile {
 public:
  // Of a size that nobody can change. Throws std::system_error.
  static MemoryFile create(const char* name, int64_t bytes);
  // The one that a running process has under `number`. Throws std::runtime_error, also
  // where its size is another.
  static MemoryFile open(int64_t process, int number, int64_t bytes, bool writable);
  MemoryFile(MemoryFile&& other) noexcept : number_(other.number_.exchange(-1)) {}
  MemoryFile& operator=(MemoryFile&&) = delete;
  ~MemoryFile() {
    close();
  }

  int number() const { // -1: closed
    return number_;
  }
  // Any thread may; mappings stay.
  void close() noexcept;

 private:
  explicit MemoryFile(int number) : number_(number) {}

  std::atomic<int> number_;
};

} // namespace zero::comm
