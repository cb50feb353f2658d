// The two products of attention over 32 positions, as register tiles. Each score is one chain over the head's columns,
// each output one chain over positions; how many rows share a tile changes no bit.
//
// Keys are turned first: kt[step][32 positions], a step being what one instruction multiplies:
//   bf16 with vdpbf16ps or AMX:  a pair of columns (32 bits, as stored)
//   otherwise:                   one column, as float32
// vdpbf16ps runs at half the rate of float32 FMA on Sapphire Rapids, at twice it on Zen 4; tdpbf16ps at 16 times.
#pragma once
#include <utility>

#include "kernels.hpp"
#include "simd.hpp"

namespace serried {
namespace {
namespace simd {

constexpr int kMaxHeadDim = 512;
constexpr int kScoreStride = kAttentionSegment + 16;  // floats; not 1 KiB, or the rows would share sets of the cache
constexpr int kTileRows = SERRIED_LANES == 16 ? 8 : SERRIED_LANES == 8 ? 6 : 4;

#if SERRIED_amx
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif
template <class T>
constexpr bool kIsBf16 = sizeof(T) == 2;
template <class T>
constexpr bool kPairSteps = kIsBf16<T> && kHasDotPairs;

// Steps of a head, and 32-bit words of a head as stored.
template <class T>
constexpr int steps(int head_dim) {
  return kPairSteps<T> ? head_dim / 2 : head_dim;
}
template <class T>
constexpr int words(int head_dim) {
  return head_dim * static_cast<int>(sizeof(T)) / 4;
}

// q: the same word in each lane; k: a step of kLanes positions.
template <class T>
inline V multiply_step(V acc, U q, U k) {
#if SERRIED_DOT_PAIRS
  if constexpr (kIsBf16<T>) return _mm512_dpbf16_ps(acc, (__m512bh)q, (__m512bh)k);
#endif
  return fma((V)q, (V)k, acc);
}

// A vector of 4-word pieces: lanes 4 b .. 4 b + 3 are words [0, 4) of row[4 b] (row: the first of every fourth).
#if SERRIED_LANES > 4
inline __m128i load_piece(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m128i load_piece(const char* p, int n) {
  alignas(16) char copy[16] = {};
  std::memcpy(copy, p, 4 * static_cast<size_t>(n));
  return _mm_load_si128(reinterpret_cast<const __m128i*>(copy));
}
#endif
template <class... N>
inline V load_pieces(const char* const* row, int64_t byte, N... n) {
#if SERRIED_LANES == 16
  __m512i v = _mm512_castsi128_si512(load_piece(row[0] + byte, n...));
  v = _mm512_inserti32x4(v, load_piece(row[4] + byte, n...), 1);
  v = _mm512_inserti32x4(v, load_piece(row[8] + byte, n...), 2);
  return (V)_mm512_inserti32x4(v, load_piece(row[12] + byte, n...), 3);
#elif SERRIED_LANES == 8
  const __m256i v = _mm256_castsi128_si256(load_piece(row[0] + byte, n...));
  return (V)_mm256_inserti128_si256(v, load_piece(row[4] + byte, n...), 1);
#else
  return (V)load_bits(row[0] + byte, n...);
#endif
}

// Turns the 4 x 4 words in each 128 bits of four vectors.
inline void turn(V* t) {
#if SERRIED_LANES == 16
  const __m512 a = _mm512_unpacklo_ps(t[0], t[1]), b = _mm512_unpackhi_ps(t[0], t[1]);
  const __m512 c = _mm512_unpacklo_ps(t[2], t[3]), d = _mm512_unpackhi_ps(t[2], t[3]);
  t[0] = _mm512_shuffle_ps(a, c, 0x44), t[1] = _mm512_shuffle_ps(a, c, 0xee);
  t[2] = _mm512_shuffle_ps(b, d, 0x44), t[3] = _mm512_shuffle_ps(b, d, 0xee);
#elif SERRIED_LANES == 8
  const __m256 a = _mm256_unpacklo_ps(t[0], t[1]), b = _mm256_unpackhi_ps(t[0], t[1]);
  const __m256 c = _mm256_unpacklo_ps(t[2], t[3]), d = _mm256_unpackhi_ps(t[2], t[3]);
  t[0] = _mm256_shuffle_ps(a, c, 0x44), t[1] = _mm256_shuffle_ps(a, c, 0xee);
  t[2] = _mm256_shuffle_ps(b, d, 0x44), t[3] = _mm256_shuffle_ps(b, d, 0xee);
#else
  const V a = t[0], b = t[1], c = t[2], d = t[3];
  for (int i = 0; i < 4; ++i) t[i] = V{a[i], b[i], c[i], d[i]};
#endif
}

// Four words of kLanes rows into their steps of kt. What lies beyond the last word becomes steps of zero.
template <class T, class... N>
inline void turn_words(const char* const* row, int word, float* kt, N... n) {
  V t[4];
  for (int i = 0; i < 4; ++i) t[i] = load_pieces(row + i, 4 * int64_t{word}, n...);
  turn(t);
  for (int i = 0; i < 4; ++i) {
    if constexpr (kIsBf16<T> && !kPairSteps<T>) {
      const Pair pair = split((U)t[i]);
      store(kt + 2 * (word + i) * kAttentionBlock, pair.a);
      store(kt + (2 * (word + i) + 1) * kAttentionBlock, pair.b);
    } else {
      store_bits(kt + (word + i) * kAttentionBlock, (U)t[i]);
    }
  }
}

// Walks memory that will be wanted next, a few lines at a time, while other work goes on: four rows side by side, since
// the core's own prefetcher follows each page for itself.
struct Ahead {
  static constexpr int kRows = 4;
  const char* const* rows = nullptr;  // each `bytes` long
  int64_t bytes = 0;
  int row = 0, row_end = 0;  // multiples of kRows
  int64_t byte = 0, due = 0;

  // Fetches about as much as has been consumed.
  void fetch(int64_t consumed) {
    due += consumed;
    for (; due >= 64 * kRows && row < row_end; due -= 64 * kRows) {
      for (int i = 0; i < kRows; ++i) __builtin_prefetch(rows[row + i] + byte, 0, 2);
      byte += 64;
      if (byte >= bytes) byte = 0, row += kRows;
    }
  }
  void fetch_rest() { fetch(INT64_MAX / 2); }
};

// kt [steps, rounded up to a multiple of 4 words][32] from 32 rows of keys.
template <class T>
[[gnu::noinline]] void turn_keys(const char* const* rows, int head_dim, float* kt, Ahead ahead) {
  const int count = words<T>(head_dim);
  for (int p = 0; p < kAttentionBlock; p += kLanes) {
    int w = 0;
    for (; w + 4 <= count; w += 4) {
      ahead.fetch(kLanes * 16);
      turn_words<T>(rows + p, w, kt + p);
    }
    if (w < count) turn_words<T>(rows + p, w, kt + p, count - w);
  }
}

// scores[r][32] = q[r] . kt. q: [step][R], a word each, so that one pointer walks through all rows.
template <class T, int R>
[[gnu::noinline]] void score_tile(const uint32_t* q, const float* kt, int step_count, float* scores) {
  for (int p = 0; p < kAttentionBlock; p += 2 * kLanes) {
    V acc[R][2] = {};
    for (int d = 0; d < step_count; ++d) {
      const U k0 = load_bits(kt + d * kAttentionBlock + p), k1 = load_bits(kt + d * kAttentionBlock + p + kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const U word = set_bits(q[d * R + r]);
        acc[r][0] = multiply_step<T>(acc[r][0], word, k0);
        acc[r][1] = multiply_step<T>(acc[r][1], word, k1);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      store(scores + r * kScoreStride + p, acc[r][0]);
      store(scores + r * kScoreStride + p + kLanes, acc[r][1]);
    }
  }
}

// Rows of values in the cache, by position.
template <class T>
struct Scattered {
  const T* base;
  const int64_t* offsets;
  const T* at(int i) const { return base + offsets[i]; }
};
// kPair columns of each position side by side, as float32: what many rows read again and again.
struct Packed {
  const float* base;
  const float* at(int i) const { return base + i * kPair; }
};

// o[r] += p[r][i] * values[i] for positions [from, to), R rows, C pairs of vectors of columns; with n: one pair of n.
// p: [R][kScoreStride]; o: [R][o_stride], columns in the order of Pair.
template <int R, int C, class Source, class... N>
[[gnu::noinline]] void value_tile(Source values, int column, const float* p, int from, int to, float* o,
                                  int64_t o_stride, Ahead* ahead, N... n) {
  Ahead fetcher = ahead == nullptr ? Ahead{} : *ahead;
  V acc[R][C][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      acc[r][c][0] = load(o + r * o_stride + c * kPair);
      acc[r][c][1] = load(o + r * o_stride + c * kPair + kLanes);
    }
  for (int i = from; i < to; ++i) {
    const auto* v = values.at(i) + column;
    fetcher.fetch(sizeof(*v) * C * kPair);
    Pair x[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) x[c] = load_pair(v + c * kPair, n...);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V weight = set(p[r * kScoreStride + i]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        acc[r][c][0] = fma(weight, x[c].a, acc[r][c][0]);
        acc[r][c][1] = fma(weight, x[c].b, acc[r][c][1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      store(o + r * o_stride + c * kPair, acc[r][c][0]);
      store(o + r * o_stride + c * kPair + kLanes, acc[r][c][1]);
    }
  if (ahead != nullptr) *ahead = fetcher;
}

// All columns of R rows; few rows take more columns at a time, so that enough chains are in flight.
template <int R, class T>
void value_rows(Scattered<T> values, int columns, const float* p, int from, int to, float* o, int64_t o_stride,
                Ahead* ahead) {
  constexpr int C = R * 4 <= kTileRows ? 4 : R * 2 <= kTileRows ? 2 : 1;
  int c = 0;
  for (; c + C * kPair <= columns; c += C * kPair) value_tile<R, C>(values, c, p, from, to, o + c, o_stride, ahead);
  for (; c + kPair <= columns; c += kPair) value_tile<R, 1>(values, c, p, from, to, o + c, o_stride, ahead);
  if (c < columns) value_tile<R, 1>(values, c, p, from, to, o + c, o_stride, ahead, columns - c);
}
// One packed pair.
template <int R>
void value_rows(Packed values, int, const float* p, int from, int to, float* o, int64_t o_stride, Ahead* ahead) {
  value_tile<R, 1>(values, 0, p, from, to, o, o_stride, ahead);
}

// Columns [column, column + kPair) (fewer: columns) of positions [from, to) for Packed.
template <class T>
[[gnu::noinline]] void pack_values(Scattered<T> values, int column, int columns, int from, int to, float* packed) {
  for (int i = from; i < to; ++i) {
    const T* v = values.at(i) + column;
    const Pair x = columns < kPair ? load_pair(v, columns) : load_pair(v);
    store(packed + i * kPair, x.a);
    store(packed + i * kPair + kLanes, x.b);
  }
}

// Calls f with the number of rows (1 .. kTileRows) as a constant.
template <class F, int... R>
inline void with_constant(int rows, F f, std::integer_sequence<int, R...>) {
  ((rows == R + 1 ? f(std::integral_constant<int, R + 1>{}) : void()), ...);
}
template <class F>
inline void with_rows(int rows, F f) {
  with_constant(rows, f, std::make_integer_sequence<int, kTileRows>{});
}

}  // namespace simd
}  // namespace
}  // namespace serried
