#include <zero/checkpoint/checksum.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace zero::checkpoint {

namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5;
constexpr int64_t kStripe = 32;

template <typename T>
T little_endian(const unsigned char* bytes) {
  T value = 0;
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(&value, bytes, sizeof(T));
  } else {
    for (size_t i = sizeof(T); i-- > 0;) {
      value = static_cast<T>(value << 8) | bytes[i];
    }
  }
  return value;
}

uint64_t round(uint64_t lane, uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

void stripe(std::array<uint64_t, 4>& lanes, const unsigned char* bytes) {
  for (size_t i = 0; i < 4; ++i) {
    lanes[i] = round(lanes[i], little_endian<uint64_t>(bytes + 8 * i));
  }
}

uint64_t merge(const std::array<uint64_t, 4>& lanes) {
  uint64_t value = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
      std::rotl(lanes[3], 18);
  for (const uint64_t lane : lanes) {
    value = (value ^ round(0, lane)) * kPrime1 + kPrime4;
  }
  return value;
}

uint64_t add_tail(uint64_t value, const unsigned char* tail, int64_t bytes) {
  for (; bytes >= 8; bytes -= 8, tail += 8) {
    value = std::rotl(value ^ round(0, little_endian<uint64_t>(tail)), 27) * kPrime1 + kPrime4;
  }
  if (bytes >= 4) {
    value ^= little_endian<uint32_t>(tail) * kPrime1;
    value = std::rotl(value, 23) * kPrime2 + kPrime3;
    bytes -= 4;
    tail += 4;
  }
  for (; bytes > 0; --bytes, ++tail) {
    value = std::rotl(value ^ (*tail * kPrime5), 11) * kPrime1;
  }
  value = (value ^ (value >> 33)) * kPrime2;
  value = (value ^ (value >> 29)) * kPrime3;
  return value ^ (value >> 32);
}

} // namespace

void Checksum::update(const void* data, int64_t bytes) {
  const auto* next = static_cast<const unsigned char*>(data);
  const auto held = static_cast<int64_t>(total_ % kStripe);
  total_ += bytes;
  if (held > 0) {
    const int64_t taken = std::min(bytes, kStripe - held);
    std::copy_n(next, taken, tail_.data() + held);
    next += taken;
    bytes -= taken;
    if (held + taken < kStripe) {
      return;
    }
    stripe(lanes_, tail_.data());
  }
  std::array<uint64_t, 4> lanes = lanes_; // in registers
  for (; bytes >= kStripe; bytes -= kStripe, next += kStripe) {
    stripe(lanes, next);
  }
  lanes_ = lanes;
  std::copy_n(next, bytes, tail_.data());
}

uint64_t Checksum::value() const {
  const uint64_t start = total_ < kStripe ? kPrime5 : merge(lanes_);
  return add_tail(start + total_, tail_.data(), static_cast<int64_t>(total_ % kStripe));
}

uint64_t checksum(const void* data, int64_t bytes) {
  Checksum sum;
  sum.update(data, bytes);
  return sum.value();
}

std::string checksum_text(uint64_t value) {
  std::string text(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) {
    text[i] = "0123456789abcdef"[value & 15];
  }
  return text;
}

bool parse_checksum(std::string_view text, uint64_t* value) {
  if (text.size() != 16) {
    return false;
  }
  *value = 0;
  for (const char digit : text) {
    const bool decimal = digit >= '0' && digit <= '9';
    if (!decimal && !(digit >= 'a' && digit <= 'f')) {
      return false;
    }
    *value = *value << 4 | static_cast<uint64_t>(decimal ? digit - '0' : digit - 'a' + 10);
  }
  return true;
}

} // namespace zero::checkpoint
