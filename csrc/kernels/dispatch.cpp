// Chooses the instruction set once, at run time, and splits work over ATen's
// threads in whole blocks of 64 bytes.

#include <algorithm>
#include <mutex>

#include <ATen/Parallel.h>

#include "csrc/kernels/kernels_impl.h"

namespace zero::kernels {

#define ZERO_KERNELS_OF(isa)                                                            \
  InstructionSet {                                                                      \
    #isa, &isa::reduce_ranks, &isa::adam, &isa::sgd, &isa::scale, &isa::accumulate_norm \
  }

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets{ZERO_KERNELS_OF(generic)};
#if defined(__x86_64__)
  // A processor with avx2 and fma has f16c.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    sets.push_back(ZERO_KERNELS_OF(avx2));
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      sets.push_back(ZERO_KERNELS_OF(avx512));
    }
  }
#endif
  return sets;
}

#undef ZERO_KERNELS_OF

namespace {

const InstructionSet& chosen() {
  static const InstructionSet widest = instruction_sets().back();
  return widest;
}

constexpr int64_t kBlock = 64; // elements: whole 64-byte blocks of every type
constexpr int64_t kGrain = 32768; // elements worth a thread

// Calls run(begin, end) over [0, count), on several threads where it pays.
template <typename Run>
void split(int64_t count, const Run& run) {
  if (count <= kGrain) {
    if (count > 0) {
      run(0, count);
    }
    return;
  }
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  at::parallel_for(0, blocks, kGrain / kBlock, [&](int64_t begin, int64_t end) {
    run(begin * kBlock, std::min(end * kBlock, count));
  });
}

} // namespace

void reduce_ranks(
    Type type,
    void* out,
    const void* const* inputs,
    int64_t input_count,
    const void* addend,
    double divisor,
    int64_t count) {
  split(count, [&](int64_t begin, int64_t end) {
    chosen().reduce_ranks(type, out, inputs, input_count, addend, divisor, begin, end);
  });
}

void adam(
    Type type,
    void* param,
    const void* grad,
    void* exp_avg,
    void* exp_avg_sq,
    int64_t count,
    const AdamArguments& arguments) {
  split(count, [&](int64_t begin, int64_t end) {
    chosen().adam(type, param, grad, exp_avg, exp_avg_sq, begin, end, arguments);
  });
}

void sgd(
    Type type,
    void* param,
    const void* grad,
    void* momentum_buffer,
    int64_t count,
    const SgdArguments& arguments) {
  split(count, [&](int64_t begin, int64_t end) {
    chosen().sgd(type, param, grad, momentum_buffer, begin, end, arguments);
  });
}

void scale(Type type, void* x, double factor, int64_t count) {
  split(count, [&](int64_t begin, int64_t end) { chosen().scale(type, x, factor, begin, end); });
}

void accumulate_norm(Type type, const void* x, int64_t count, double p, ExactSum& sum) {
  std::mutex mutex;
  split(count, [&](int64_t begin, int64_t end) {
    ExactSum part;
    chosen().accumulate_norm(type, x, p, begin, end, part);
    const std::lock_guard lock(mutex);
    sum.merge(part);
  });
}

} // namespace zero::kernels
