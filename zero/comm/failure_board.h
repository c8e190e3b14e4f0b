#pragma once

// Where the ranks of an engine with several communicators write what made them
// fail. Ranks that wait in different communicators see nothing of each other but
// their absence: the board tells each what the others were in.

#include <string>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
} // namespace c10d

namespace zero::comm {

class FailureBoard {
 public:
  FailureBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size);

  // Writes this rank's failure and gives a moment to the others: what they wrote,
  // as "; meanwhile on rank 1: ...", empty if nothing. Never throws.
  std::string post(const std::string& failure) noexcept;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  const int64_t rank_;
  const int64_t size_;
};

} // namespace zero::comm
