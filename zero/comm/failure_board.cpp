#include <zero/comm/failure_board.h>

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace zero::comm {
namespace {

using std::chrono::milliseconds;

// Ranks that wait for each other time out at about the same time.
constexpr int kBoardLooks = 15;
constexpr milliseconds kPause{100};

std::string key_of(int64_t rank) {
  return "failure/" + std::to_string(rank);
}

} // namespace

FailureBoard::FailureBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size)
    : store_(std::move(store)), rank_(rank), size_(size) {}

std::string FailureBoard::post(const std::string& failure) noexcept {
  std::string others;
  try {
    store_->set(key_of(rank_), std::vector<uint8_t>(failure.begin(), failure.end()));
    for (int64_t rank = 0; rank < size_; ++rank) {
      for (int look = 0; rank != rank_ && look < kBoardLooks; ++look) {
        if (store_->check({key_of(rank)})) {
          const auto theirs = store_->get(key_of(rank));
          others += "; meanwhile on rank " + std::to_string(rank) + ": " +
              std::string(theirs.begin(), theirs.end());
          break;
        }
        std::this_thread::sleep_for(kPause);
      }
    }
  } catch (...) { // NOLINT(bugprone-empty-catch): the store may be gone with its rank
  }
  return others;
}

} // namespace zero::comm
