#pragma once

// Ranks as threads of one process: each has its own process group, and all meet
// at one HashStore. Catch's assertions are not made for threads, so a body
// reports by throwing: TORCH_CHECK, or REQUIRE after run_ranks() returned.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <fstream>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <zero/comm/error_text.h>
#include <zero/comm/init.h>

namespace zero::test {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using RankBody = std::function<void(int64_t rank, const Group& group)>;

// What `body` throws, as text; empty if it does not.
template <typename Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (...) {
    return comm::text_of(std::current_exception());
  }
  return {};
}

// What of `parts` is missing in `text`, as a complaint; empty if nothing is.
inline std::string contains_all(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    if (text.find(part) == std::string::npos) {
      return "expected '" + part + "' in '" + text + "'";
    }
  }
  return {};
}

inline void check_contains(const std::string& text, const std::vector<std::string>& parts) {
  const auto complaint = contains_all(text, parts);
  TORCH_CHECK(complaint.empty(), complaint);
}

// Mappings of a process ("self", "4711") whose file has `part` in its name.
inline int64_t mappings_of(const std::string& process, const std::string& part) {
  std::ifstream maps("/proc/" + process + "/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find(part) == std::string::npos ? 0 : 1;
  }
  return count;
}

// Runs `body` on `size` threads and joins them. Throws the exception that came
// first (the others' are often its consequences), with its rank.
template <typename Body>
void run_threads(int64_t size, const Body& body) {
  std::mutex mutex;
  std::string first_error;
  const auto run = [&](int64_t rank) {
    try {
      body(rank);
    } catch (...) {
      const auto text = comm::text_of(std::current_exception());
      const std::lock_guard lock(mutex);
      if (first_error.empty()) {
        first_error = "rank " + std::to_string(rank) + " of " + std::to_string(size) + ": " + text;
      }
    }
  };
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back(run, rank);
  }
  for (auto& thread : threads) {
    thread.join();
  }
  if (!first_error.empty()) {
    throw std::runtime_error(first_error);
  }
}

// Where ranks that are threads meet apart from what is tested.
class MeetingPoint {
 public:
  explicit MeetingPoint(int64_t size) : size_(size) {}

  // Returns when all are here.
  void meet() {
    std::unique_lock lock(mutex_);
    const int64_t round = arrived_++ / size_;
    changed_.notify_all();
    const bool all = changed_.wait_for(
        lock, std::chrono::seconds(60), [&] { return arrived_ >= (round + 1) * size_; });
    TORCH_CHECK(all, "a rank did not come to the meeting point");
  }

 private:
  const int64_t size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t arrived_ = 0;
};

inline void run_ranks(int64_t size, const RankBody& body, double timeout_seconds = 60.0) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_threads(size, [&](int64_t rank) {
    body(rank, zero::make_gloo_group(store, rank, size, timeout_seconds));
  });
}

// A group that has a store and no backend: enough for ranks of one host.
inline Group store_group(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size) {
  return c10::make_intrusive<c10d::ProcessGroup>(
      store, static_cast<int>(rank), static_cast<int>(size));
}

inline void run_host_ranks(int64_t size, const RankBody& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_threads(size, [&](int64_t rank) { body(rank, store_group(store, rank, size)); });
}

} // namespace zero::test
