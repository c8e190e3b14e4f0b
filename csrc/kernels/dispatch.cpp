// Chooses the instruction set once, at run time, and splits work over ATen's
// threads in whole blocks of 64 bytes.

#include <algorithm>
#include <atomic>
#include <mutex>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include "csrc/kernels/kernels_impl.h"

namespace zero::kernels {

#define ZERO_KERNELS_OF(isa)                                                               \
  InstructionSet {                                                                         \
    #isa, &isa::reduce_ranks, &isa::adam, &isa::sgd, &isa::lion, &isa::scale, &isa::clamp, \
        &isa::convert, &isa::accumulate, &isa::follow, &isa::first_nonfinite,              \
        &isa::accumulate_norm                                                              \
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
constexpr int64_t kPiece = 2048; // elements that stay in the first cache

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

// Masters of fp32 take gradients and give copies of other types.
void check_types(Type type, Type grad_type, const Copy& copy) {
  const bool mixed = type == Type::f32 && grad_type != Type::f64 && copy.type != Type::f64;
  TORCH_INTERNAL_ASSERT(mixed || (grad_type == type && copy.data == nullptr));
}

} // namespace

void reduce_ranks(const Reduction& reduction, int64_t count) {
  const bool widens = reduction.type != Type::f64 && reduction.out_type == Type::f32;
  TORCH_INTERNAL_ASSERT(widens || reduction.type == reduction.out_type);
  split(count, [&](int64_t begin, int64_t end) { chosen().reduce_ranks(reduction, begin, end); });
}

void adam(Type type, const AdamBuffers& buffers, int64_t count, const AdamArguments& arguments) {
  check_types(type, buffers.grad_type, buffers.copy);
  split(count, [&](int64_t begin, int64_t end) {
    chosen().adam(type, buffers, begin, end, arguments);
  });
}

void sgd(Type type, const SgdBuffers& buffers, int64_t count, const SgdArguments& arguments) {
  check_types(type, buffers.grad_type, buffers.copy);
  split(count, [&](int64_t begin, int64_t end) {
    chosen().sgd(type, buffers, begin, end, arguments);
  });
}

void lion(Type type, const LionBuffers& buffers, int64_t count, const LionArguments& arguments) {
  check_types(type, buffers.grad_type, buffers.copy);
  split(count, [&](int64_t begin, int64_t end) {
    chosen().lion(type, buffers, begin, end, arguments);
  });
}

void scale(Type type, void* x, double factor, int64_t count) {
  split(count, [&](int64_t begin, int64_t end) { chosen().scale(type, x, factor, begin, end); });
}

void clamp(Type type, void* x, double low, double high, int64_t count) {
  split(count, [&](int64_t begin, int64_t end) { chosen().clamp(type, x, low, high, begin, end); });
}

void convert(Type from_type, const void* from, Type to_type, void* to, int64_t count) {
  if (from == to && from_type == to_type) {
    return;
  }
  split(count, [&](int64_t begin, int64_t end) {
    chosen().convert(from_type, from, to_type, to, begin, end);
  });
}

void accumulate(Type from_type, const void* from, float* to, int64_t count) {
  split(count, [&](int64_t begin, int64_t end) {
    chosen().accumulate(from_type, from, to, begin, end);
  });
}

void follow(Type from_type, const void* from, float* to, int64_t count) {
  split(
      count, [&](int64_t begin, int64_t end) { chosen().follow(from_type, from, to, begin, end); });
}

int64_t first_nonfinite(Type type, const void* x, int64_t count) {
  std::atomic<int64_t> first = count;
  split(count, [&](int64_t begin, int64_t end) {
    int64_t before = first.load();
    if (begin >= before) {
      return;
    }
    const int64_t found = chosen().first_nonfinite(type, x, begin, end);
    while (found < end && found < before && !first.compare_exchange_weak(before, found)) {
    }
  });
  return first == count ? -1 : first.load();
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

void scale_and_accumulate_norm(
    Type type,
    void* x,
    double factor,
    int64_t count,
    double p,
    ExactSum& sum) {
  std::mutex mutex;
  split(count, [&](int64_t begin, int64_t end) {
    ExactSum part;
    for (int64_t first = begin; first < end; first += kPiece) {
      const int64_t last = std::min(first + kPiece, end);
      chosen().scale(type, x, factor, first, last);
      chosen().accumulate_norm(type, x, p, first, last, part);
    }
    const std::lock_guard lock(mutex);
    sum.merge(part);
  });
}

} // namespace zero::kernels
