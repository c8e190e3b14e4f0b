#pragma once

// The kernels as each instruction set compiles them: on one thread, over one
// stretch of whole 64-byte blocks. dispatch.cpp chooses and splits.

#include <vector>

#include "csrc/kernels/kernels.h"

#define ZERO_DECLARE_KERNELS(isa)                                                                 \
  namespace zero::kernels::isa {                                                                  \
  void reduce_ranks(                                                                              \
      Type type,                                                                                  \
      void* out,                                                                                  \
      const void* const* inputs,                                                                  \
      int64_t input_count,                                                                        \
      const void* addend,                                                                         \
      double divisor,                                                                             \
      int64_t begin,                                                                              \
      int64_t end);                                                                               \
  void adam(                                                                                      \
      Type type,                                                                                  \
      void* param,                                                                                \
      const void* grad,                                                                           \
      void* exp_avg,                                                                              \
      void* exp_avg_sq,                                                                           \
      int64_t begin,                                                                              \
      int64_t end,                                                                                \
      const AdamArguments& arguments);                                                            \
  void sgd(                                                                                       \
      Type type,                                                                                  \
      void* param,                                                                                \
      const void* grad,                                                                           \
      void* momentum_buffer,                                                                      \
      int64_t begin,                                                                              \
      int64_t end,                                                                                \
      const SgdArguments& arguments);                                                             \
  void scale(Type type, void* x, double factor, int64_t begin, int64_t end);                      \
  void                                                                                            \
  accumulate_norm(Type type, const void* x, double p, int64_t begin, int64_t end, ExactSum& sum); \
  }

ZERO_DECLARE_KERNELS(generic)
ZERO_DECLARE_KERNELS(avx2)
ZERO_DECLARE_KERNELS(avx512)

#undef ZERO_DECLARE_KERNELS

namespace zero::kernels {

struct InstructionSet {
  const char* name;
  decltype(&generic::reduce_ranks) reduce_ranks;
  decltype(&generic::adam) adam;
  decltype(&generic::sgd) sgd;
  decltype(&generic::scale) scale;
  decltype(&generic::accumulate_norm) accumulate_norm;
};

// Those that this processor has, the widest last.
std::vector<InstructionSet> instruction_sets();

} // namespace zero::kernels
