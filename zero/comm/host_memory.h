#pragma once

// Reads the memory of other ranks of this host: in place where they are threads of
// this process or the bytes lie in a HostArena, else by process_vm_readv, one copy
// made by the kernel.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <zero/comm/host_arena.h>
#include <zero/comm/host_process.h>

namespace zero::comm {

class HostMemory {
 public:
  HostMemory(std::vector<HostProcess> processes, int64_t rank);

  // Whether the bytes at `address` of each other process can be read; `expected` is
  // what stands there. Tried on the spot.
  struct Probe {
    uint64_t address = 0;
    uint64_t expected = 0;
  };
  bool can_read(const std::vector<Probe>& probes) const;

  bool same_process(int64_t rank) const {
    return same_process_[rank];
  }
  // Maps a peer's arena, where that can be done.
  void map_arena(int64_t rank, const std::string& address);
  bool has_arena(int64_t rank) const {
    return arenas_[rank] != nullptr;
  }
  // The bytes themselves, or a copy in `scratch`. Throws std::system_error.
  const char* view(int64_t rank, uint64_t address, int64_t bytes, char* scratch) const;
  void copy(int64_t rank, uint64_t address, int64_t bytes, char* to) const;
  // An operation has ended.
  void rest() const;

 private:
  // The bytes in this process's address space, or null.
  const char* in_place(int64_t rank, uint64_t address, int64_t bytes) const;

  std::vector<HostProcess> processes_;
  std::vector<bool> same_process_;
  std::vector<std::unique_ptr<PeerArena>> arenas_;
};

// Lets processes that are not this one's parent read its memory, where the kernel
// asks for it (Yama, as on Ubuntu).
void allow_reads_by_peers();

} // namespace zero::comm
