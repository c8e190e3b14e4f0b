#pragma once

// What the benchmarks' programs are told on their command lines.

#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

namespace zero::benchmarks {

// Throws std::invalid_argument for what is no number, or below 1.
inline int64_t number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1) {
    throw std::invalid_argument("expected a number from 1 on, got " + std::string(text));
  }
  return value;
}

} // namespace zero::benchmarks
