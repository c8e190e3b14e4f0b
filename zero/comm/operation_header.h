#pragma once

// What ranks tell each other at the start of an operation: 256 bytes that identify it,
// so that ranks in different operations learn it with names instead of mixing their
// payloads. Written and read by PeerExchange on the communicator's thread.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include <zero/comm/communicator.h>

namespace zero::comm {

struct OperationHeader {
  static constexpr uint64_t kMagic = 0x31304f52455a2d32; // "2-ZERO01"
  static constexpr int32_t kGaveUp = -1; // in place of a kind: `text` says why
  static constexpr std::size_t kWhatSize = 96;
  static constexpr std::size_t kInlineSize = 96;

  uint64_t magic = kMagic;
  int64_t sequence = 0;
  int32_t kind = 0;
  int32_t dtype = -1; // of reductions; other operations move bytes
  int64_t id = 0;
  int64_t step = 0;
  int64_t bytes = 0; // of one shard; in exchange() each rank's own
  double divisor = 1.0;
  int32_t root = 0;
  int32_t reserved = 0;
  // The operation's name for errors, then a payload small enough to travel here.
  std::array<char, kWhatSize + kInlineSize> text{};

  char* inline_payload() {
    return text.data() + kWhatSize;
  }
  const char* inline_payload() const {
    return text.data() + kWhatSize;
  }
};
static_assert(sizeof(OperationHeader) == 256);

OperationHeader make_header(Kind kind, const Tag& tag, int64_t bytes);

// Tells the peers that this rank's communicator failed.
OperationHeader make_gave_up(std::string_view why);
std::string why_gave_up(const OperationHeader& header);

bool same_operation(const OperationHeader& left, const OperationHeader& right);

// Of all that same_operation() compares; of an exchange's bytes as little as that.
uint64_t identity_hash(const OperationHeader& header);

// "reduce_scatter of bucket 2 (blocks.3.up.weight ...) at step 7"
std::string describe(Kind kind, const Tag& tag);
std::string describe(const OperationHeader& header);

// The complaint that ranks `left` and `right` are in different operations.
std::string describe_mismatch(
    int64_t left_rank,
    const OperationHeader& left,
    int64_t right_rank,
    const OperationHeader& right);

} // namespace zero::comm
