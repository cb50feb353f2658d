// Exact sums of products of bytes: x in int8 times the unsigned values of a quantized group of weights, over its 32 k.
//
// Three ways, by what the instruction set has:
//   vpdpbusd     four products of bytes, added to 32 bits
//   vpmaddubsw   two products of bytes in 16 bits, which saturate: half bytes cannot (8 * 2 * 15 * 127 < 2^15), so all
//                eight steps of a group of int4 are added in 16 bits. For whole bytes there is the third way
//   words        bytes of w apart in 16 bits, the even and the odd; two products of words, added to 32 bits (pmaddwd).
//                x comes as pairs of words (see PairsOfX). This way is open to every set
// Integers have no order of additions: the ways, and all instruction sets, agree.
#pragma once
#include <cstring>

#include "half.hpp"
#include "linear_lanes.hpp"

#if SERRIED_avx512_bf16 || SERRIED_amx || SERRIED_avx2_vnni
#define SERRIED_VNNI 1
#else
#define SERRIED_VNNI 0
#endif
#if !SERRIED_LINEAR_512 && defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace serried {
namespace {
namespace linear_detail {

constexpr int kLanes = Vec::kWidth;
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes)));

inline Ints all(int32_t value) { return Ints{} + value; }
inline Bytes low_halves(Bytes w) { return w & 15; }
inline Bytes high_halves(Bytes w) { return (Bytes)((Words)w >> 4) & 15; }
inline Bytes load_bytes(const char* p) {
  Bytes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
// The same four bytes for all outputs.
inline Ints four_of(const char* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return all(four);
}

#if SERRIED_LINEAR_512
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps((__m512i)v); }
inline Floats load_halves(const char* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Ints multiply_words(Words w, Ints x) { return (Ints)_mm512_madd_epi16((__m512i)w, (__m512i)x); }
inline Words multiply_bytes(Bytes w, Ints x) { return (Words)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
#if SERRIED_VNNI
inline Ints add_products(Ints sum, Bytes w, Ints x) { return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
#endif
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
#elif SERRIED_avx2 || SERRIED_avx2_vnni
inline Floats to_floats(Ints v) { return _mm256_cvtepi32_ps((__m256i)v); }
inline Floats load_halves(const char* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Ints multiply_words(Words w, Ints x) { return (Ints)_mm256_madd_epi16((__m256i)w, (__m256i)x); }
inline Words multiply_bytes(Bytes w, Ints x) { return (Words)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
#if SERRIED_VNNI
inline Ints add_products(Ints sum, Bytes w, Ints x) { return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x); }
#endif
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
#else
inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
inline Floats load_halves(const char* p) {
  typedef uint16_t Four __attribute__((vector_size(8)));
  Four four;
  std::memcpy(&four, p, sizeof four);
  const Unsigned bits = __builtin_convertvector(four, Unsigned), magnitude = bits & 0x7fff;
  const Floats small = __builtin_convertvector((Ints)magnitude, Floats) * 0x1p-24f;  // exact for denormals
  const Unsigned wide = (magnitude << 13) + (magnitude >= 0x7c00 ? Unsigned{} + (224u << 23) : Unsigned{} + (112u << 23));
  const Unsigned value = magnitude < 0x400 ? (Unsigned)small : wide;
  return (Floats)(value | (bits & 0x8000) << 16);
}
inline Ints multiply_words(Words w, Ints x) {
#if defined(__SSE2__)
  return (Ints)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
  const Ints low = ((Ints)w << 16) >> 16, high = (Ints)w >> 16;
  return low * ((x << 16) >> 16) + high * (x >> 16);
#endif
}
inline Floats multiply(Floats a, Floats b) { return a * b; }
#endif

// What x is read as, and in which order. Bytes: as they are. Words: a pair (k, k + 2), then (k + 1, k + 3), for each
// four of k.
template <Format kFormat>
constexpr bool kTakesWords =
#if SERRIED_VNNI
    false;
#elif SERRIED_LINEAR_512 || SERRIED_avx2
    kFormat == Format::kInt8;
#else
    true;
#endif

// A step: 256 bytes of weights, which are 4 k, or (half bytes) 4 k and another 4 that lie 16 after. x: of the group's
// first k, `stride` bytes between tokens.
template <Format kFormat, int M, int V>
struct GroupSums {
  static constexpr bool kHalves = kFormat != Format::kInt8;
  static constexpr int kSteps = kHalves ? 4 : 8;

  // sum: what to begin with.
  template <class Ahead>
  [[gnu::always_inline]] static inline void add(const char* weight, const char* x, int64_t stride, Ints (&sum)[M][V],
                                                Ahead&& ahead) {
#if SERRIED_VNNI
    for (int f = 0; f < kSteps; ++f, weight += kStepBytes) {
      ahead(f);
      Bytes w[V];
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) w[j] = load_bytes(weight + j * 4 * kLanes);
      if constexpr (!kHalves) {
        add_bytes(w, x + 4 * f, stride, sum);
        continue;
      }
      Bytes low[V], high[V];
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) low[j] = low_halves(w[j]), high[j] = high_halves(w[j]);
      add_bytes(low, x + 4 * f, stride, sum);
      add_bytes(high, x + 16 + 4 * f, stride, sum);
    }
#else
    if constexpr (kTakesWords<kFormat>) {
      by_words(weight, x, stride, sum, ahead);
    } else {
      by_half_bytes(weight, x, stride, sum, ahead);
    }
#endif
  }

 private:
#if SERRIED_VNNI
  [[gnu::always_inline]] static inline void add_bytes(const Bytes (&w)[V], const char* x, int64_t stride,
                                                      Ints (&sum)[M][V]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Ints four = four_of(x + m * stride);
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) sum[m][j] = add_products(sum[m][j], w[j], four);
    }
  }
#else
#if SERRIED_LINEAR_512 || SERRIED_avx2
  template <class Ahead>
  [[gnu::always_inline]] static inline void by_half_bytes(const char* weight, const char* x, int64_t stride,
                                                          Ints (&sum)[M][V], Ahead&& ahead) {
    Words pairs[M][V] = {};
    for (int f = 0; f < kSteps; ++f, weight += kStepBytes) {
      ahead(f);
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) {
        const Bytes w = load_bytes(weight + j * 4 * kLanes), low = low_halves(w), high = high_halves(w);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          pairs[m][j] += multiply_bytes(low, four_of(x + m * stride + 4 * f));
          pairs[m][j] += multiply_bytes(high, four_of(x + m * stride + 16 + 4 * f));
        }
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) sum[m][j] += multiply_words(pairs[m][j], all(0x00010001));
    }
  }
#endif
  template <class Ahead>
  [[gnu::always_inline]] static inline void by_words(const char* weight, const char* x, int64_t stride,
                                                     Ints (&sum)[M][V], Ahead&& ahead) {
    for (int f = 0; f < kSteps; ++f, weight += kStepBytes) {
      ahead(f);
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) {
        const Words w = (Words)load_bytes(weight + j * 4 * kLanes);
        if constexpr (kHalves) {
          add_words(w & 15, w >> 8 & 15, x + 8 * f, stride, j, sum);
          add_words(w >> 4 & 15, w >> 12, x + 32 + 8 * f, stride, j, sum);
        } else {
          add_words(w & 255, w >> 8, x + 8 * f, stride, j, sum);
        }
      }
    }
  }
  [[gnu::always_inline]] static inline void add_words(Words even, Words odd, const char* x, int64_t stride, int j,
                                                      Ints (&sum)[M][V]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      sum[m][j] += multiply_words(even, four_of(x + m * stride));
      sum[m][j] += multiply_words(odd, four_of(x + m * stride + 4));
    }
  }
#endif
};

}  // namespace linear_detail
}  // namespace
}  // namespace serried
