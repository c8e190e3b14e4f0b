#pragma once

// What train_gpt.cpp says while it trains.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>

#include <unistd.h>

// A line on rank 0 every twentieth of the run; on a terminal each step rewrites
// it.
class Progress {
 public:
  Progress(int64_t first, int64_t steps, int64_t tokens_per_step, bool shown)
      : first_(first),
        steps_(steps),
        tokens_(tokens_per_step),
        shown_(shown),
        terminal_(isatty(STDOUT_FILENO) == 1) {}

  void step(int64_t done, double loss, double seconds) {
    seconds_ += seconds;
    const int64_t every = terminal_ ? 1 : std::max<int64_t>(1, steps_ / 20);
    if (!shown_ || done % every != 0) {
      return;
    }
    const double each = seconds_ / static_cast<double>(done - first_);
    const auto left = std::llround(each * static_cast<double>(steps_ - done));
    std::printf(
        "%sstep %5lld/%lld  loss %.4f  %.0f tokens/s  %02lld:%02lld left%s",
        terminal_ ? "\r\033[K" : "",
        static_cast<long long>(done),
        static_cast<long long>(steps_),
        loss,
        static_cast<double>(tokens_) / each,
        left / 60,
        left % 60,
        terminal_ ? "" : "\n");
    std::fflush(stdout);
  }

  void validation(int64_t done, double loss) const {
    if (shown_) {
      std::printf(
          "%sstep %5lld/%lld  validation loss %.6f\n",
          terminal_ ? "\r\033[K" : "",
          static_cast<long long>(done),
          static_cast<long long>(steps_),
          loss);
      std::fflush(stdout);
    }
  }

 private:
  int64_t first_, steps_, tokens_;
  bool shown_, terminal_;
  double seconds_ = 0.0; // of this process
};
