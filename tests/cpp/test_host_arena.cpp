// Buffers that other processes read in place.

#include "catch.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include <zero/comm/host_arena.h>

using zero::comm::HostArena;
using zero::comm::PeerArena;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// A field of /proc/self/status, in bytes.
int64_t status(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    if (int64_t kib = 0; word == field + ":" && file >> kib) {
      return kib * 1024;
    }
  }
  return -1;
}

bool is_zero(const c10::Storage& storage) {
  const auto* data = static_cast<const char*>(storage.data());
  return std::all_of(data, data + storage.nbytes(), [](char c) { return c == 0; });
}

void fill(const c10::Storage& storage, int value) {
  std::memset(storage.mutable_data(), value, storage.nbytes());
}

} // namespace

TEST_CASE("a buffer of the arena is zeroed memory that comes and goes", "[host]") {
  const auto arena = HostArena::create();
  if (!arena) {
    WARN("no huge pages for shared memory here");
    return;
  }
  const int64_t before = status("RssShmem");
  REQUIRE(arena->held() == 0);
  auto first = arena->allocate(3 * kMiB);
  REQUIRE(is_zero(first));
  REQUIRE(reinterpret_cast<uintptr_t>(first.data()) % 64 == 0);
  fill(first, 7);
  auto second = arena->allocate(kMiB / 2); // in the rest of the second page
  REQUIRE(is_zero(second));
  fill(second, 8);
  REQUIRE(arena->held() == 4 * kMiB);
  REQUIRE(status("RssShmem") - before == 4 * kMiB);
  first = {};
  REQUIRE(arena->held() == 2 * kMiB);
  REQUIRE(status("RssShmem") - before == 2 * kMiB);
  auto third = arena->allocate(3 * kMiB); // the first one's place, part of it used before
  REQUIRE(is_zero(third));
  REQUIRE(*static_cast<const char*>(second.data()) == 8);
  second = {};
  third = {};
  REQUIRE(arena->held() == 0);
  REQUIRE(status("RssShmem") == before);
  REQUIRE_FALSE(arena->allocate(0));
  REQUIRE_FALSE(arena->allocate(int64_t{1} << 60));
}

TEST_CASE("buffers of the arena never overlap, whatever the order", "[host]") {
  const auto arena = HostArena::create();
  if (!arena) {
    WARN("no huge pages for shared memory here");
    return;
  }
  struct Held {
    c10::Storage storage;
    char value;
  };
  std::vector<Held> held;
  std::mt19937_64 random(1);
  const auto check = [](const Held& item) {
    const auto* data = static_cast<const char*>(item.storage.data());
    const auto right = [&](char c) { return c == item.value; };
    REQUIRE(std::all_of(data, data + item.storage.nbytes(), right));
  };
  for (int i = 0; i < 400; ++i) {
    if (held.size() < 12 && random() % 5 < 3) {
      auto storage = arena->allocate(static_cast<int64_t>(1 + random() % (2 * kMiB)));
      REQUIRE(is_zero(storage));
      held.push_back({std::move(storage), static_cast<char>(1 + i % 100)});
      fill(held.back().storage, held.back().value);
    } else if (!held.empty()) {
      const auto chosen = held.begin() + static_cast<int64_t>(random() % held.size());
      check(*chosen);
      held.erase(chosen);
    }
  }
  std::for_each(held.begin(), held.end(), check);
  held.clear();
  REQUIRE(arena->held() == 0);
  const auto all = arena->allocate(64 * kMiB); // what was free is one piece again
  REQUIRE(all);
  REQUIRE(arena->held() == 64 * kMiB);
}

TEST_CASE("a peer sees what is written and keeps little of it in memory", "[host]") {
  const auto arena = HostArena::create();
  if (!arena) {
    WARN("no huge pages for shared memory here");
    return;
  }
  const auto storage = arena->allocate(32 * kMiB);
  fill(storage, 3);
  PeerArena peer(getpid(), arena->address());
  arena->close_file();
  const auto address = reinterpret_cast<uint64_t>(storage.data());
  const int64_t before = status("VmRSS");
  for (int64_t begin = 0; begin < 32 * kMiB; begin += kMiB) {
    peer.reading(kMiB);
    const char* data = peer.find(address + begin, kMiB);
    REQUIRE(data != nullptr);
    REQUIRE(std::all_of(data, data + kMiB, [](char c) { return c == 3; }));
  }
  REQUIRE(status("VmRSS") - before < 10 * kMiB);
  REQUIRE(peer.find(address - 32 * kMiB, 1) == nullptr);
  REQUIRE(peer.find(reinterpret_cast<uint64_t>(&before), 8) == nullptr);
  REQUIRE(peer.find(address, int64_t{1} << 50) == nullptr);
  REQUIRE_THROWS(PeerArena(getpid(), arena->address())); // its file is closed
}

TEST_CASE("a forked child frees nothing of its parent's", "[host]") {
  auto arena = HostArena::create();
  if (!arena) {
    WARN("no huge pages for shared memory here");
    return;
  }
  auto storage = arena->allocate(2 * kMiB);
  fill(storage, 5);
  const pid_t child = fork();
  if (child == 0) {
    const bool none = !arena->allocate(kMiB);
    storage = {};
    arena = nullptr;
    _exit(none ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(status == 0);
  const auto* data = static_cast<const char*>(storage.data());
  REQUIRE(std::all_of(data, data + 2 * kMiB, [](char c) { return c == 5; }));
}
