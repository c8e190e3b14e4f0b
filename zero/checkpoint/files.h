#pragma once

// POSIX files with errors that name the file. Everything below zero/checkpoint that
// touches the disk does it here or through it. Internal.
//
// A failing system call is a c10::Error; a file that is not what it should be, a
// c10::ValueError.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <zero/api.h>

namespace zero::checkpoint {

// An open file or directory; closed with the object.
class ZERO_API File {
 public:
  File() = default;
  File(int number, std::string path) : number_(number), path_(std::move(path)) {}
  File(File&& other) noexcept
      : number_(std::exchange(other.number_, -1)), path_(std::move(other.path_)) {}
  File& operator=(File&& other) noexcept;
  ~File();

  int number() const {
    return number_;
  }
  const std::string& path() const {
    return path_;
  }

  // Of a regular file.
  int64_t bytes() const;
  // Seconds since the epoch in nanoseconds: when it was last written.
  int64_t modified() const;
  // Exactly `bytes` bytes from `offset`; a file that ends before is an error.
  void read(int64_t offset, void* destination, int64_t bytes) const;
  // Lets the disk begin with what was written so far: sync() has less to wait for.
  void start_sync() const noexcept;
  // Flushed to the disk. `needed` as in write_all.
  void sync(int64_t needed = -1) const;
  // Closes and throws, where the destructor would be silent.
  void close(int64_t needed = -1);

 private:
  int number_ = -1;
  std::string path_;
};

enum class Links { follow, refuse };

// A regular file, for reading; anything else is refused without waiting on it.
File open_file(const std::string& path, Links links = Links::follow);
File open_file(const File& directory, const std::string& name); // Links::refuse
File open_directory(const std::string& path);
// Must not exist yet, not as a link either.
File create_file(const std::string& path);

// All of it, in large writes from where it lies. `needed` is the size of the whole
// file, for the error of a full disk.
void write_all(const File& file, const void* data, int64_t bytes, int64_t needed);
// The error of `errno` after an operation ("writing", "flushing") on a file of `needed`
// bytes.
std::string
write_error(int error, const std::string& operation, const std::string& path, int64_t needed);

// Names in a directory, sorted, without "." and "..".
std::vector<std::string> names_in(const File& directory);
// Removes a file, not a directory; false where it could not be removed.
bool remove_file(const File& directory, const std::string& name) noexcept;

[[noreturn]] void fail(int error, const std::string& operation, const std::string& path);

} // namespace zero::checkpoint
