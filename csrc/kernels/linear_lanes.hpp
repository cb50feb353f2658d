// Vectors of outputs as linears hold them, and how a chain of sums begins and ends: see linear_drive.hpp.
#pragma once
#include <cstring>

#include "linear_drive.hpp"

#if SERRIED_avx512 || SERRIED_avx512_bf16 || SERRIED_amx
#define SERRIED_LINEAR_512 1
#endif
#if SERRIED_LINEAR_512 || SERRIED_avx2 || SERRIED_avx2_vnni
#include <immintrin.h>
#endif

namespace serried {
namespace {
namespace linear_detail {

// prefetch_line is always inlined for a reason: GCC takes a function that only prefetches for one without effects, and
// drops calls of it.
#if SERRIED_LINEAR_512
struct Vec {
  static constexpr int kWidth = 16;
  static constexpr int kRegisters = 32;
  using Floats = __m512;
  using Words = __m512i;
  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
  static Floats all(float v) { return _mm512_set1_ps(v); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats multiply_add(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }
  static Words words(const void* p) { return _mm512_loadu_si512(p); }
  // Not by _mm512_slli_epi32: GCC 12 warns of an uninitialized value inside it.
  static Floats even(Words w) { return reinterpret_cast<Floats>(reinterpret_cast<__v16su>(w) << 16); }
  static Floats odd(Words w) {
    return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
};
[[gnu::always_inline]] inline void prefetch_line(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }
#elif SERRIED_avx2 || SERRIED_avx2_vnni
struct Vec {
  static constexpr int kWidth = 8;
  static constexpr int kRegisters = 16;
  using Floats = __m256;
  using Words = __m256i;
  static Floats zero() { return _mm256_setzero_ps(); }
  static Floats load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
  static Floats all(float v) { return _mm256_set1_ps(v); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats multiply_add(Floats sum, Floats a, Floats b) { return _mm256_fmadd_ps(a, b, sum); }
  static Words words(const void* p) { return _mm256_loadu_si256(static_cast<const Words*>(p)); }
  static Floats even(Words w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
  static Floats odd(Words w) {
    return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
};
[[gnu::always_inline]] inline void prefetch_line(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }
#else
// The compiler's own vectors of 16 bytes: SSE2, NEON or whatever there is. Two roundings, no fma.
struct Vec {
  static constexpr int kWidth = 4;
  static constexpr int kRegisters = 16;
  typedef float Floats __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(16)));
  static Floats zero() { return Floats{}; }
  static Floats load(const float* p) {
    Floats v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
  static Floats all(float v) { return Floats{v, v, v, v}; }
  static Floats add(Floats a, Floats b) { return a + b; }
  static Floats multiply_add(Floats sum, Floats a, Floats b) { return sum + a * b; }
  static Words words(const void* p) {
    Words v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static Floats even(Words w) { return reinterpret_cast<Floats>(w << 16); }
  static Floats odd(Words w) { return reinterpret_cast<Floats>(w & 0xffff0000u); }
};
[[gnu::always_inline]] inline void prefetch_line(const char* p) { __builtin_prefetch(p); }
#endif

using Floats = Vec::Floats;
constexpr int kVectors = kTile / Vec::kWidth;
constexpr bool kWide = Vec::kRegisters == 32;

// The sums so far of M tokens, V vectors of outputs from `column` of the tile on.
template <int M, int V>
[[gnu::always_inline]] inline void begin_sums(const Segment& s, int column, bool first, Floats (&sum)[M][V]) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) {
      sum[m][j] = first ? Vec::zero() : Vec::load(s.slot + m * kTile + column + j * Vec::kWidth);
    }
  }
}

// Puts the sum of a whole leaf where it belongs. y_stride: floats between two tokens of one node. kSlot: tokens of a slot.
template <int M, int V, int kSlot = M>
[[gnu::always_inline]] inline void end_leaf(const Segment& s, int column, int64_t y_stride, Floats (&sum)[M][V]) {
  const float* below = s.slot + column;
  for (int32_t p = 0; p < s.pops; ++p) {
    below -= kSlot * kTile;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) sum[m][j] = Vec::add(Vec::load(below + m * kTile + j * Vec::kWidth), sum[m][j]);
    }
  }
  if (s.ends_node && s.bias) {
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) {
      const Floats bias = Vec::load(s.bias + column + j * Vec::kWidth);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) sum[m][j] = Vec::add(sum[m][j], bias);
    }
  }
  float* to = s.ends_node ? s.y + column : s.slot + column - s.pops * kSlot * kTile;
  const int64_t to_stride = s.ends_node ? y_stride : int64_t{kTile};
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) Vec::store(to + m * to_stride + j * Vec::kWidth, sum[m][j]);
  }
}

// last: of the segment; sums of an unfinished leaf wait in the slot.
template <int M, int V, int kSlot = M>
[[gnu::always_inline]] inline void end_sums(const Segment& s, int column, bool last, int64_t y_stride,
                                            Floats (&sum)[M][V]) {
  if (last && s.ends_leaf) return end_leaf<M, V, kSlot>(s, column, y_stride, sum);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) Vec::store(s.slot + m * kTile + column + j * Vec::kWidth, sum[m][j]);
  }
}

}  // namespace linear_detail
}  // namespace
}  // namespace serried
