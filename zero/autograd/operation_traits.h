#pragma once

// What an operation does with its inputs, from its schema.

#include <cstdint>

namespace at {
struct RecordFunction;
} // namespace at

namespace zero::autograd {

struct OperationTraits {
  // False for what looks at shapes only, or makes a view: what reads through the
  // view is an operation of its own.
  bool reads = true;
  uint64_t writes = 0; // a bit for each argument
  bool writes_argument(int64_t index) const {
    return index < 64 && ((writes >> index) & 1U) != 0;
  }
};

// Fast after an operation's first time on a thread.
OperationTraits traits_of(const at::RecordFunction& function);

} // namespace zero::autograd
