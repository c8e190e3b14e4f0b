#pragma once

// Texts as what an exchange carries, and a number that stands for one.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace zero::comm {

inline at::Tensor bytes_of(std::string_view text) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  if (!text.empty()) {
    std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  }
  return bytes;
}

inline std::string text_of(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

// FNV-1a, 64 bits.
inline uint64_t fingerprint(std::string_view text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const char character : text) {
    hash = (hash ^ static_cast<uint8_t>(character)) * 1099511628211ULL;
  }
  return hash;
}

} // namespace zero::comm
