#pragma once

// The kernels as each instruction set compiles them: on one thread, over one
// stretch of whole 64-byte blocks. dispatch.cpp chooses and splits.

#include <vector>

#include "csrc/kernels/kernels.h"

namespace zero::kernels {

// Of one stretch [begin, end).
using ReduceStretch = void(const Reduction& reduction, int64_t begin, int64_t end);
template <typename Buffers, typename Arguments>
using OptimizerStretch =
    void(Type type, const Buffers& buffers, int64_t begin, int64_t end, const Arguments& arguments);
using ScaleStretch = void(Type type, void* x, double factor, int64_t begin, int64_t end);
using ClampStretch = void(Type type, void* x, double low, double high, int64_t begin, int64_t end);
using ConvertStretch =
    void(Type from_type, const void* from, Type to_type, void* to, int64_t begin, int64_t end);
using IntoFloatsStretch =
    void(Type from_type, const void* from, float* to, int64_t begin, int64_t end);
// Returns `end` where all is finite.
using FirstNonfiniteStretch = int64_t(Type type, const void* x, int64_t begin, int64_t end);
using NormStretch =
    void(Type type, const void* x, double p, int64_t begin, int64_t end, ExactSum& sum);

#define ZERO_DECLARE_KERNELS(isa)                    \
  namespace isa {                                    \
  ReduceStretch reduce_ranks;                        \
  OptimizerStretch<AdamBuffers, AdamArguments> adam; \
  OptimizerStretch<SgdBuffers, SgdArguments> sgd;    \
  OptimizerStretch<LionBuffers, LionArguments> lion; \
  ScaleStretch scale;                                \
  ClampStretch clamp;                                \
  ConvertStretch convert;                            \
  IntoFloatsStretch accumulate;                      \
  IntoFloatsStretch follow;                          \
  FirstNonfiniteStretch first_nonfinite;             \
  NormStretch accumulate_norm;                       \
  }

ZERO_DECLARE_KERNELS(generic)
ZERO_DECLARE_KERNELS(avx2)
ZERO_DECLARE_KERNELS(avx512)

#undef ZERO_DECLARE_KERNELS

struct InstructionSet {
  const char* name;
  ReduceStretch* reduce_ranks;
  OptimizerStretch<AdamBuffers, AdamArguments>* adam;
  OptimizerStretch<SgdBuffers, SgdArguments>* sgd;
  OptimizerStretch<LionBuffers, LionArguments>* lion;
  ScaleStretch* scale;
  ClampStretch* clamp;
  ConvertStretch* convert;
  IntoFloatsStretch* accumulate;
  IntoFloatsStretch* follow;
  FirstNonfiniteStretch* first_nonfinite;
  NormStretch* accumulate_norm;
};

// Those that this processor has, the widest last.
std::vector<InstructionSet> instruction_sets();

} // namespace zero::kernels
