#pragma once

// fp16 by chunks: widened to fp32 in the first cache, worked on there by the fp32
// loops, and narrowed back. By the processor's own conversions where the compiler
// may use them; those give the same bits as Float16 does.

#include <algorithm>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "csrc/kernels/elements.h"

namespace zero::kernels::ZERO_KERNELS_NAMESPACE {

constexpr int64_t kChunk = 512; // elements

struct alignas(64) Chunk {
  float values[kChunk];
};

#if defined(__AVX512F__)
// Without a mask, GCC 12 warns of the intrinsics' own uninitialized operand.
constexpr __mmask16 kAll = 0xFFFF;
#endif

inline void widen(const uint16_t* from, float* to, int64_t count) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm512_storeu_ps(to + i, _mm512_maskz_cvtph_ps(kAll, half));
  }
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(half));
  }
#endif
  for (; i < count; ++i) {
    to[i] = Float16::load(from[i]);
  }
}

inline void narrow(const float* from, uint16_t* to, int64_t count) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    const __m512 value = _mm512_loadu_ps(from + i);
    const __m256i half = _mm512_maskz_cvtps_ph(kAll, value, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), half);
  }
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
  }
#endif
  for (; i < count; ++i) {
    to[i] = Float16::store(from[i]);
  }
}

// Calls function(first, count) for each chunk of [begin, end).
template <typename Function>
void for_chunks(int64_t begin, int64_t end, const Function& function) {
  for (int64_t first = begin; first < end; first += kChunk) {
    function(first, std::min(kChunk, end - first));
  }
}

} // namespace zero::kernels::ZERO_KERNELS_NAMESPACE
