#pragma once

// What the C library does with memory that is freed: autograd makes a gradient for each
// parameter and drops it once it was added to its bucket.

#include <cstdint>

namespace zero::memory {

// For the process, until it is called again: blocks of up to `largest` bytes come from
// the heap, which keeps up to 48 MiB free at its end; larger ones are mapped, and gone
// when they are freed, but for one (large_blocks.h). By itself the library gives back what backward
// frees and gets it again as new pages, of which the system has to make zeros: up to a fifth of the
// step of a large model. What is freed between blocks that live longer stays, so `largest` bounds
// what a heap grows to. Does nothing outside glibc, and where the environment has settings of its
// own (MALLOC_..., GLIBC_TUNABLES).
void keep_heap(int64_t largest);

// Hands what the heap has free back to the system: after tensors of a whole model
// were freed one by one.
void return_free_memory();

} // namespace zero::memory
