#pragma once

// The memory that the ranks of one host share to agree on operations: a small
// record for each rank and channel, and a window for bytes where ranks may not
// read each other's memory. A MemoryFile.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include <zero/comm/memory_file.h>
#include <zero/comm/operation_header.h>

namespace zero::comm {

constexpr int64_t kHostInlineBytes = 4096;
constexpr int64_t kHostWindowBytes = int64_t{1} << 19;
constexpr size_t kHostFailureBytes = 2048;

// What a rank says of one operation. Two, used in turn: a rank is at most one
// operation ahead of the others.
struct alignas(64) HostPost {
  OperationHeader header;
  uint64_t address; // of what peers read, in this rank's address space
  int64_t more_bytes; // behind the input in inline_bytes
  alignas(64) std::array<char, kHostInlineBytes> inline_bytes; // what is small travels here
};

// A rank in one channel. Counters only grow; each starts at the epoch's base.
struct alignas(64) HostSlot {
  std::atomic<int64_t> posted; // operations that this rank has opened
  std::atomic<int64_t> staged; // windows that this rank has filled
  std::atomic<int64_t> taken; // times that this rank was done with the others' bytes
  std::atomic<int64_t> finished; // operations, by their numbers
  std::atomic<int64_t> entered; // epochs
  std::atomic<int32_t> reading; // this rank reads the others' memory
  std::atomic<int32_t> closed; // this rank's communicator is gone
  // Where this rank sleeps: `bell` changes when a peer did something.
  alignas(64) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> asleep;
  alignas(64) std::array<HostPost, 2> posts;
};

// A rank in all channels.
struct alignas(64) HostMember {
  std::atomic<int64_t> failed; // epochs that this rank gave up
  std::array<std::atomic<char>, kHostFailureBytes> why; // it did
};

class HostSegment {
 public:
  // A new one, all zero. Throws std::system_error.
  static std::shared_ptr<HostSegment> create(int64_t ranks, int64_t channels);
  // The one that create() made, here or in another process that runs: "<pid> <file
  // descriptor> <random>". Throws std::runtime_error.
  static std::shared_ptr<HostSegment>
  open(const std::string& address, int64_t ranks, int64_t channels);
  ~HostSegment();
  // Once all ranks have it: nobody can open it any more.
  void close_file() {
    file_.close();
  }
  HostSegment(const HostSegment&) = delete;
  HostSegment& operator=(const HostSegment&) = delete;

  const std::string& address() const {
    return address_;
  }
  HostMember& member(int64_t rank);
  HostSlot& slot(int64_t rank, int64_t channel);
  // One of the two windows of a rank and channel, kHostWindowBytes long.
  char* window(int64_t rank, int64_t channel, int64_t which);

 private:
  HostSegment(MemoryFile file, std::string address, int64_t ranks, int64_t channels);

  MemoryFile file_;
  const std::string address_;
  const int64_t ranks_;
  const int64_t channels_;
  char* data_ = nullptr;
};

} // namespace zero::comm
