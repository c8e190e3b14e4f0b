#pragma once

// How a device's threads share a buffer: packs of elements that one instruction loads,
// taken in turns by all threads. The edges that no pack covers go element by element.

#include <algorithm>
#include <initializer_list>

#include "csrc/kernels/elements.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

constexpr int kPackBytes = 16; // the most that one instruction loads
constexpr int kThreads = 256; // of a block

// Loops over packs are unrolled for devices.
#if defined(__CUDA_ARCH__)
#define ZERO_UNROLL _Pragma("unroll")
#else
#define ZERO_UNROLL
#endif

template <typename E, int kPack>
struct alignas(kPack * sizeof(typename E::Storage)) Pack {
  typename E::Storage values[kPack];
};

// What a device moves a pack as: its compiler takes structs of elements apart, and in
// stores does not always put them together again.
template <int kBytes>
struct Word;
#if defined(__CUDACC__)
template <>
struct Word<16> {
  using Type = uint4;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<4> {
  using Type = uint32_t;
};
template <>
struct Word<2> {
  using Type = uint16_t;
};
#endif

template <typename E, int kPack>
ZERO_HOST_DEVICE Pack<E, kPack> load_pack(const void* data, int64_t index) {
#if defined(__CUDA_ARCH__)
  using W = typename Word<sizeof(Pack<E, kPack>)>::Type;
  return bit_cast<Pack<E, kPack>>(*reinterpret_cast<const W*>(at<E>(data, index)));
#else
  return *reinterpret_cast<const Pack<E, kPack>*>(at<E>(data, index));
#endif
}

template <typename E, int kPack>
ZERO_HOST_DEVICE void store_pack(void* data, int64_t index, const Pack<E, kPack>& pack) {
#if defined(__CUDA_ARCH__)
  using W = typename Word<sizeof(Pack<E, kPack>)>::Type;
  __stwb(reinterpret_cast<W*>(at<E>(data, index)), bit_cast<W>(pack)); // a plain store
#else
  *reinterpret_cast<Pack<E, kPack>*>(at<E>(data, index)) = pack;
#endif
}

// Elements a pack such that the widest of the types fills an instruction: the threads
// of a warp then read and write whole lines of every buffer.
template <typename... E>
constexpr int pack_of() {
  return kPackBytes / static_cast<int>(std::max({sizeof(typename E::Storage)...}));
}

// [0, head), packs, [head + packs * kPack, count).
struct Span {
  int64_t head;
  int64_t packs;
  int64_t count;
};

// A buffer that packs are loaded from or stored to; null: none.
struct Place {
  const void* data;
  int64_t size; // of an element, bytes
};

// The span where packs are aligned in all places at once, or one without packs.
inline Span make_span(std::initializer_list<Place> places, int pack, int64_t count) {
  const auto offset = [pack](const Place& place, int64_t index) {
    const auto address = reinterpret_cast<uintptr_t>(place.data) + index * place.size;
    return static_cast<int64_t>(address % (pack * place.size));
  };
  for (int64_t head = 0; head < pack; ++head) {
    const bool aligned = std::all_of(places.begin(), places.end(), [&](const Place& place) {
      return place.data == nullptr || offset(place, head) == 0;
    });
    if (aligned) {
      return {std::min(head, count), std::max<int64_t>(count - head, 0) / pack, count};
    }
  }
  return {0, 0, count};
}

// The turns thread, thread + threads, ... below `count`, whose elements start at
// index_of(turn).
template <int kPack, int kUnroll, typename Work, typename Constants, typename IndexOf>
ZERO_HOST_DEVICE void take_turns(
    const Work& work,
    const Constants& constants,
    int64_t count,
    const IndexOf& index_of,
    int64_t thread,
    int64_t threads) {
  using Loaded = decltype(work.template load<kPack>(0, constants));
  int64_t turn = thread;
  for (; turn + (kUnroll - 1) * threads < count; turn += kUnroll * threads) {
    Loaded loaded[kUnroll];
    ZERO_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      loaded[u] = work.template load<kPack>(index_of(turn + u * threads), constants);
    }
    ZERO_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      work.template finish<kPack>(index_of(turn + u * threads), loaded[u], constants);
    }
  }
  for (; turn < count; turn += threads) {
    const int64_t index = index_of(turn);
    work.template finish<kPack>(index, work.template load<kPack>(index, constants), constants);
  }
}

// What the thread `thread` of `threads` has to do of a span. Work has
//   load<kPack>(index, constants): what the elements from `index` on are made from;
//   finish<kPack>(index, loaded, constants): computes and stores them;
//   kUnroll: how many packs are loaded before the first is stored;
//   kBlocks: of a processor at once, which bounds the registers of a thread.
template <int kPack, typename Work, typename Constants>
ZERO_HOST_DEVICE void run_span(
    const Work& work,
    const Constants& constants,
    const Span& span,
    int64_t thread,
    int64_t threads) {
  const int64_t head = span.head;
  const int64_t covered = span.packs * kPack;
  const auto pack_at = [head](int64_t turn) { return head + turn * kPack; };
  const auto edge_at = [head, covered](int64_t turn) {
    return turn < head ? turn : turn + covered;
  };
  take_turns<kPack, Work::kUnroll>(work, constants, span.packs, pack_at, thread, threads);
  take_turns<1, (Work::kUnroll > 1 ? 4 : 1)>(
      work, constants, span.count - covered, edge_at, thread, threads);
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
