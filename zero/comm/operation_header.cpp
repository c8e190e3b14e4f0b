// Making, comparing and wording of operation headers; no communication here.

#include <zero/comm/operation_header.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <zero/comm/error_text.h>

namespace zero::comm {
namespace {

constexpr std::string_view kDots = "...";

void put_text(OperationHeader& header, std::string_view text, std::size_t capacity) {
  const auto limit = capacity - 1;
  const auto length = std::min(text.size(), limit);
  std::memcpy(header.text.data(), text.data(), length);
  if (text.size() > limit) {
    std::memcpy(header.text.data() + limit - kDots.size(), kDots.data(), kDots.size());
  }
  header.text[length] = '\0';
}

std::string get_text(const OperationHeader& header, std::size_t capacity) {
  return {header.text.data(), strnlen(header.text.data(), capacity)};
}

std::string describe(Kind kind, std::string_view what, int64_t step) {
  std::string text = name_of(kind);
  if (!what.empty()) {
    text.append(" of ").append(what);
  }
  return text + " at step " + std::to_string(step);
}

// Only what the two ranks don't share already is worth saying.
std::string describe(const OperationHeader& header, const OperationHeader& other) {
  auto text = describe(
      static_cast<Kind>(header.kind), get_text(header, OperationHeader::kWhatSize), header.step);
  if (header.id != other.id) {
    text += ", id " + std::to_string(header.id);
  }
  if (header.bytes != other.bytes) {
    text += ", " + std::to_string(header.bytes) + " bytes a rank";
  }
  if (header.dtype != other.dtype && header.dtype >= 0) {
    text += std::string(", ") + c10::toString(static_cast<c10::ScalarType>(header.dtype));
  }
  if (header.divisor != other.divisor) {
    text += c10::str(", divisor ", header.divisor);
  }
  if (header.root != other.root) {
    text += ", root " + std::to_string(header.root);
  }
  if (header.sequence != other.sequence) {
    text += ", operation " + std::to_string(header.sequence);
  }
  return text;
}

} // namespace

const char* name_of(Kind kind) {
  switch (kind) {
  case Kind::reduce_scatter:
    return "reduce_scatter";
  case Kind::all_gather:
    return "all_gather";
  case Kind::all_reduce:
    return "all_reduce";
  case Kind::broadcast:
    return "broadcast";
  case Kind::barrier:
    return "barrier";
  case Kind::exchange:
    return "exchange";
  }
  return "an unknown operation";
}

OperationHeader make_header(Kind kind, const Tag& tag, int64_t bytes) {
  OperationHeader header;
  header.kind = static_cast<int32_t>(kind);
  header.id = tag.id;
  header.step = tag.step;
  header.bytes = bytes;
  put_text(header, tag.what, OperationHeader::kWhatSize);
  return header;
}

OperationHeader make_gave_up(std::string_view why) {
  OperationHeader header;
  header.kind = OperationHeader::kGaveUp;
  put_text(header, why, header.text.size());
  return header;
}

std::string why_gave_up(const OperationHeader& header) {
  return get_text(header, header.text.size());
}

namespace {

// What ranks of one operation have in common.
std::array<uint64_t, 9> identity(const OperationHeader& header) {
  const bool sizes_may_differ = header.kind == static_cast<int32_t>(Kind::exchange);
  return {
      header.magic,
      static_cast<uint64_t>(header.sequence),
      static_cast<uint64_t>(header.kind),
      static_cast<uint64_t>(header.dtype),
      static_cast<uint64_t>(header.id),
      static_cast<uint64_t>(header.step),
      sizes_may_differ ? 0 : static_cast<uint64_t>(header.bytes),
      std::bit_cast<uint64_t>(header.divisor),
      static_cast<uint64_t>(header.root)};
}

} // namespace

bool same_operation(const OperationHeader& left, const OperationHeader& right) {
  return identity(left) == identity(right);
}

// FNV-1a by words: the same on every host.
uint64_t identity_hash(const OperationHeader& header) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const uint64_t field : identity(header)) {
    hash = (hash ^ field) * 0x100000001b3;
    hash ^= hash >> 32; // a product's low bits know nothing of the high ones
  }
  return hash;
}

std::string describe(const OperationHeader& header) {
  return describe(header, header);
}

std::string describe(Kind kind, const Tag& tag) {
  return describe(kind, tag.what, tag.step);
}

std::string describe_mismatch(
    int64_t left_rank,
    const OperationHeader& left,
    int64_t right_rank,
    const OperationHeader& right) {
  if (left.magic != right.magic) {
    return c10::str(
        "ranks disagree: rank ",
        left_rank,
        " and rank ",
        right_rank,
        " speak different versions of Zero; install the same version on every host");
  }
  return c10::str(
      "ranks disagree: rank ",
      left_rank,
      " is in ",
      describe(left, right),
      ", rank ",
      right_rank,
      " is in ",
      describe(right, left),
      "; every rank must run the same operations in the same order and with the same sizes: look "
      "for a branch in the model or the training loop that only some ranks take",
      kUnevenData);
}

} // namespace zero::comm
