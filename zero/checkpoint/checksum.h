#pragma once

// XXH64, seed 0: what the manifest holds of each piece of a tensor, and of itself.
// It finds damage, not tampering.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include <zero/api.h>

namespace zero::checkpoint {

class ZERO_API Checksum {
 public:
  void update(const void* data, int64_t bytes);
  // Of all bytes so far; more may follow.
  uint64_t value() const;

 private:
  std::array<uint64_t, 4> lanes_ = {
      0x60EA27EEADC0B5D6, // P1 + P2, P2, 0 and -P1 of the specification, for seed 0
      0xC2B2AE3D27D4EB4F,
      0,
      0x61C8864E7A143579};
  std::array<unsigned char, 32> tail_ = {}; // the last total_ % 32 bytes
  uint64_t total_ = 0;
};

ZERO_API uint64_t checksum(const void* data, int64_t bytes);

// 16 lower-case hex digits, and back. False where the text is anything else.
ZERO_API std::string checksum_text(uint64_t value);
ZERO_API bool parse_checksum(std::string_view text, uint64_t* value);

} // namespace zero::checkpoint
