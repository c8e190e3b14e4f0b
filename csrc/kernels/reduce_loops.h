#pragma once

// Sums over the ranks' inputs: one pass for up to four of them, and for more a
// chunk at a time, four inputs a pass. `out` may be an input or the addend itself,
// which no iteration but its own reads: hence ivdep in place of __restrict.

#include <utility>

#include "csrc/kernels/windows.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

// finish(i, total) takes each sum of first(i) and the inputs of the given indices.
template <typename E, size_t... kInput, typename First, typename Finish>
void add_inputs(
    std::index_sequence<kInput...>,
    const First& first,
    const void* const* inputs,
    [[maybe_unused]] int64_t begin,
    int64_t count,
    const Finish& finish) {
  [[maybe_unused]] const typename E::Storage* const more[] = {
      at<E>(inputs[kInput], begin)..., nullptr};
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    typename E::Compute total = first(i);
    ((total += E::load(more[kInput][i])), ...);
    finish(i, total);
  }
}

// Sums the first 1 to 4 inputs.
template <typename E, typename Finish>
void sum_few(
    const void* const* inputs,
    int64_t input_count,
    int64_t begin,
    int64_t count,
    const Finish& finish) {
  const auto first = [from = at<E>(inputs[0], begin)](int64_t i) { return E::load(from[i]); };
  const auto add = [&](auto indices) {
    add_inputs<E>(indices, first, inputs + 1, begin, count, finish);
  };
  switch (input_count) {
  case 1:
    add(std::make_index_sequence<0>{});
    break;
  case 2:
    add(std::make_index_sequence<1>{});
    break;
  case 3:
    add(std::make_index_sequence<2>{});
    break;
  default:
    add(std::make_index_sequence<3>{});
    break;
  }
}

// Sums five inputs or more, a chunk of `count` at most kChunk.
template <typename E, typename Finish>
void sum_many(
    const void* const* inputs,
    int64_t input_count,
    int64_t begin,
    int64_t count,
    const Finish& finish) {
  alignas(64) typename E::Compute sum[kChunk];
  const auto sofar = [&sum](int64_t i) { return sum[i]; };
  const auto keep = [&sum](int64_t i, auto total) { sum[i] = total; };
  sum_few<E>(inputs, 4, begin, count, keep);
  int64_t k = 4;
  for (; k + 4 < input_count; k += 4) {
    add_inputs<E>(std::make_index_sequence<4>{}, sofar, inputs + k, begin, count, keep);
  }
  for (; k + 1 < input_count; ++k) {
    add_inputs<E>(std::make_index_sequence<1>{}, sofar, inputs + k, begin, count, keep);
  }
  add_inputs<E>(std::make_index_sequence<1>{}, sofar, inputs + k, begin, count, finish);
}

template <typename E, typename Finish>
void sum_range(const Reduction& task, int64_t begin, int64_t count, const Finish& finish) {
  if (task.input_count <= 4) {
    sum_few<E>(task.inputs, task.input_count, begin, count, finish);
    return;
  }
  for_chunks(0, count, [&](int64_t first, int64_t length) {
    const auto shifted = [&finish, first](int64_t i, auto total) { finish(first + i, total); };
    sum_many<E>(task.inputs, task.input_count, begin + first, length, shifted);
  });
}

template <typename E, typename Out>
void reduce_range(const Reduction& task, int64_t begin, int64_t end) {
  const auto by = static_cast<typename E::Compute>(task.divisor);
  auto* const to = at<Out>(task.out, begin);
  if (task.addend == nullptr) {
    sum_range<E>(task, begin, end - begin, [to, by](int64_t i, auto total) {
      to[i] = Out::store(total / by);
    });
  } else {
    const auto* const base = at<Out>(task.addend, begin);
    sum_range<E>(task, begin, end - begin, [to, base, by](int64_t i, auto total) {
      to[i] = Out::store(Out::load(base[i]) + total / by);
    });
  }
}

inline void reduce_halves(const Reduction& task, int64_t begin, int64_t end) {
  const auto by = static_cast<float>(task.divisor);
  Chunk sum;
  Chunk next;
  for_chunks(begin, end, [&](int64_t first, int64_t count) {
    widen(at<Float16>(task.inputs[0], first), sum.values, count);
    for (int64_t k = 1; k < task.input_count; ++k) {
      widen(at<Float16>(task.inputs[k], first), next.values, count);
      for (int64_t i = 0; i < count; ++i) {
        sum.values[i] += next.values[i];
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      sum.values[i] /= by;
    }
    if (task.addend != nullptr) {
      const float* const base = view_floats(task.out_type, task.addend, first, count, next);
      for (int64_t i = 0; i < count; ++i) {
        sum.values[i] = base[i] + sum.values[i];
      }
    }
    write_floats(task.out_type, sum.values, task.out, first, count);
  });
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
