#pragma once

// Torch's CPU tensors above the heap's limit (heap.h): each is mapped, zeroed by the
// system page by page, and gone when it is freed, which for the gradients of a large
// model's backward takes a fifth of a step.

#include <cstdint>

namespace zero::memory {

// For the process: what torch frees of at least `smallest` bytes is kept, one block of at
// most 32 MiB at a time, and serves the next tensor of at least half its size. Where
// gradients follow each other that costs no memory. Does nothing outside glibc, and where torch has
// an allocator of somebody else.
void keep_large_block(int64_t smallest);

// Gives the block back: at the end of a backward.
void drop_large_block() noexcept;

} // namespace zero::memory
