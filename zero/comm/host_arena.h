#pragma once

// Flat buffers that the other ranks of the host read in place. Each process has one
// MemoryFile, mapped once by itself and by each peer: as large as the
// machine's memory, sparse, and filled with huge pages where something is allocated.
// With small pages it would cost more than it saves: they are slow to make, and the
// kernel copies huge private pages as fast.
//
// Forked children share these buffers with their parent, as all shared memory; they
// neither allocate nor free here.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <zero/comm/memory_file.h>
#include <zero/memory/buffer_source.h>

namespace zero::comm {

// A file mapped at a multiple of the size of a huge page.
class ArenaMapping {
 public:
  // Throws std::system_error.
  ArenaMapping(int file, int64_t bytes, bool writable);
  ~ArenaMapping();
  ArenaMapping(const ArenaMapping&) = delete;
  ArenaMapping& operator=(const ArenaMapping&) = delete;
  char* data() const {
    return data_;
  }
  int64_t bytes() const {
    return bytes_;
  }

 private:
  char* data_ = nullptr;
  const int64_t bytes_;
};

// This process's. Thread-safe.
class HostArena final : public memory::BufferSource,
                        public std::enable_shared_from_this<HostArena> {
 public:
  // Null where the system gives no huge pages to shared memory on request.
  static std::shared_ptr<HostArena> create();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // The storage keeps the arena.
  c10::Storage allocate(int64_t bytes) override;

  // What a peer needs to map it.
  std::string address() const;
  // Once all peers have it: nobody can open it any more.
  void close_file() {
    file_.close();
  }
  // Bytes of memory that it takes from the system.
  int64_t held() const;

 private:
  HostArena(MemoryFile file, int64_t bytes);

  struct Block {
    std::shared_ptr<HostArena> arena;
    int64_t begin;
    int64_t bytes;
  };
  static void free_block(void* context);
  void free(int64_t begin, int64_t bytes) noexcept;
  int64_t find_room(int64_t bytes);
  void populate(int64_t first_page, int64_t end_page);

  const int64_t process_;
  MemoryFile file_;
  const ArenaMapping mapping_;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> free_; // begin to bytes; neighbours are joined
  std::vector<int32_t> users_; // blocks in each huge page
};

// A peer's, mapped to read.
class PeerArena {
 public:
  // Throws std::exception where it can't be had.
  PeerArena(int64_t process, const std::string& address);

  // The bytes that the peer has at `address`, or null where that is not in here.
  const char* find(uint64_t address, int64_t bytes) const {
    const uint64_t offset = address - base_;
    const bool inside = address >= base_ && offset + bytes <= static_cast<uint64_t>(size());
    return inside ? mapping_->data() + offset : nullptr;
  }
  // Says that so many bytes are about to be read. Unmaps now and then what was read,
  // which counts as this process's memory too.
  void reading(int64_t bytes);
  // An operation has ended.
  void rest();

 private:
  void unmap_read();
  int64_t size() const {
    return mapping_->bytes();
  }

  uint64_t base_ = 0; // in the peer's address space
  std::unique_ptr<ArenaMapping> mapping_;
  std::atomic<int64_t> read_ = 0; // bytes since the last unmapping
};

} // namespace zero::comm
