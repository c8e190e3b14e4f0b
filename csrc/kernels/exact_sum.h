#pragma once

// A sum of non-negative doubles that does not depend on their order: a fixed-
// point accumulator of 640 bits (weights 2^-320 to 2^319) in integer limbs.

#include <array>
#include <cstdint>

namespace zero::kernels {

class ExactSum {
 public:
  // Fixed-size form for exchange between ranks.
  struct Wire {
    std::array<uint64_t, 10> limbs{}; // least significant first
    uint64_t flags = 0; // 1: an infinity (or a value too large), 2: a NaN
    double maximum = 0.0;
  };

  // Adds a value >= 0; infinities and NaN are remembered, values below 2^-320
  // are dropped.
  void add(double value);
  // For infinity norms: the largest value seen (NaN is remembered).
  void raise_maximum(double value);
  void merge(const ExactSum& other);

  Wire wire() const;
  static ExactSum from_wire(const Wire& wire);

  // The sum, or the maximum, rounded to nearest; NaN if a NaN was added, else
  // infinity if an infinity was.
  double total() const;
  double maximum() const;
  // No infinity and no NaN was added or seen, and nothing was too large to be held
  // (from 2^319 on).
  bool finite() const;

 private:
  void normalize();
  // Digits of 32 bits with room for carries of 2^31 additions.
  std::array<uint64_t, 22> digits_{};
  uint64_t pending_ = 0;
  uint64_t flags_ = 0;
  double maximum_ = 0.0;
};

} // namespace zero::kernels
