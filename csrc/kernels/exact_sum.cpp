#include "csrc/kernels/exact_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace zero::kernels {
namespace {

constexpr uint64_t kInfinite = 1;
constexpr uint64_t kNan = 2;
constexpr int64_t kLowest = -320; // weight of the lowest bit, as a power of two
constexpr int64_t kTooLarge = 1023 + 319; // biased exponent
constexpr uint64_t kCarryEvery = uint64_t{1} << 30;
constexpr uint64_t kDigitMask = 0xFFFFFFFFU;

} // namespace

void ExactSum::add(double value) {
  const auto bits = std::bit_cast<uint64_t>(value);
  const auto exponent = static_cast<int64_t>((bits >> 52) & 0x7FFU);
  // The value is mantissa * 2^(exponent - 1075), for normal numbers.
  int64_t position = exponent - 1075 - kLowest;
  uint64_t mantissa = (bits & 0xFFFFFFFFFFFFFULL) | (uint64_t{1} << 52);
  if (position < 0) {
    if (position <= -53 || exponent == 0) {
      return; // zero, or too small for the lowest bit
    }
    mantissa >>= -position;
    position = 0;
  } else if (exponent >= kTooLarge) {
    flags_ |= std::isnan(value) ? kNan : kInfinite;
    return;
  }
  const auto digit = static_cast<size_t>(position / 32);
  const auto shift = static_cast<unsigned>(position % 32);
  const uint64_t low = mantissa << shift;
  const uint64_t high = shift == 0 ? 0 : mantissa >> (64 - shift);
  digits_[digit] += low & kDigitMask;
  digits_[digit + 1] += low >> 32;
  digits_[digit + 2] += high;
  if (++pending_ == kCarryEvery) {
    normalize();
  }
}

void ExactSum::raise_maximum(double value) {
  if (std::isnan(value)) {
    flags_ |= kNan;
  } else {
    maximum_ = std::max(maximum_, value);
  }
}

void ExactSum::normalize() {
  uint64_t carry = 0;
  for (uint64_t& digit : digits_) {
    digit += carry;
    carry = digit >> 32;
    digit &= kDigitMask;
  }
  pending_ = 0;
}

void ExactSum::merge(const ExactSum& other) {
  ExactSum carried = other;
  carried.normalize();
  for (size_t i = 0; i < digits_.size(); ++i) {
    digits_[i] += carried.digits_[i];
  }
  if (++pending_ == kCarryEvery) {
    normalize();
  }
  flags_ |= other.flags_;
  maximum_ = std::max(maximum_, other.maximum_);
}

ExactSum::Wire ExactSum::wire() const {
  ExactSum carried = *this;
  carried.normalize();
  Wire wire;
  for (size_t i = 0; i < wire.limbs.size(); ++i) {
    wire.limbs[i] = carried.digits_[2 * i] | (carried.digits_[2 * i + 1] << 32);
  }
  wire.flags = flags_;
  if (carried.digits_[20] != 0 || carried.digits_[21] != 0) {
    wire.flags |= kInfinite;
  }
  wire.maximum = maximum_;
  return wire;
}

ExactSum ExactSum::from_wire(const Wire& wire) {
  ExactSum sum;
  for (size_t i = 0; i < wire.limbs.size(); ++i) {
    sum.digits_[2 * i] = wire.limbs[i] & kDigitMask;
    sum.digits_[2 * i + 1] = wire.limbs[i] >> 32;
  }
  sum.flags_ = wire.flags;
  sum.maximum_ = wire.maximum;
  return sum;
}

double ExactSum::total() const {
  const Wire exact = wire();
  if ((exact.flags & kNan) != 0) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  if ((exact.flags & kInfinite) != 0) {
    return std::numeric_limits<double>::infinity();
  }
  auto top = static_cast<int64_t>(exact.limbs.size()) - 1;
  while (top > 0 && exact.limbs[top] == 0) {
    --top;
  }
  // The leading 64 bits, with everything below folded into the last one, so that
  // the conversion to double rounds the exact value.
  uint64_t leading = exact.limbs[top];
  const int zeros = std::countl_zero(leading);
  bool rest = false;
  int64_t lowest = top * 64;
  if (top > 0) {
    const uint64_t next = exact.limbs[top - 1];
    if (zeros > 0) {
      leading = (leading << zeros) | (next >> (64 - zeros));
      rest = (next << zeros) != 0;
      lowest -= zeros;
    } else {
      rest = next != 0;
    }
    for (int64_t i = top - 2; i >= 0; --i) {
      rest = rest || exact.limbs[i] != 0;
    }
  }
  leading |= rest ? 1 : 0;
  return std::ldexp(static_cast<double>(leading), static_cast<int>(lowest + kLowest));
}

double ExactSum::maximum() const {
  return (flags_ & kNan) != 0 ? std::numeric_limits<double>::quiet_NaN() : maximum_;
}

bool ExactSum::finite() const {
  return wire().flags == 0 && std::isfinite(maximum_);
}

} // namespace zero::kernels
