#pragma once

// Timeouts are seconds in our interfaces and milliseconds in c10d's.

#include <algorithm>
#include <chrono>
#include <cmath>

#include <c10/util/Exception.h>

namespace zero::comm {

// At least 1 ms, because c10d takes 0 for "no timeout"; at most 100 days.
inline std::chrono::milliseconds to_milliseconds(double seconds) {
  TORCH_CHECK_VALUE(
      seconds > 0.0, "[zero.comm] expected a positive timeout in seconds, got ", seconds);
  const double milliseconds = std::min(std::ceil(seconds * 1e3), 8.64e9);
  return std::chrono::milliseconds(static_cast<int64_t>(milliseconds));
}

} // namespace zero::comm
