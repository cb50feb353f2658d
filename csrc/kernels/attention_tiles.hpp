// The two products of attention over 32 positions, as register tiles. Each score is one chain over the head's columns,
// each output one chain over positions; how many rows share a tile changes no bit.
//
// Keys are turned first: kt[step][32 positions], a step being what one instruction multiplies:
//   bf16 with vdpbf16ps:  a pair of columns (32 bits, as stored)
//   otherwise:            one column, as float32
#pragma once
#include <utility>

#include "kernels.hpp"
#include "simd.hpp"

namespace serried {
namespace {
namespace simd {

constexpr int kMaxHeadDim = 512;
constexpr int kTileRows = SERRIED_LANES == 16 ? 8 : SERRIED_LANES == 8 ? 6 : 4;

template <class T>
constexpr bool kIsBf16 = sizeof(T) == 2;
template <class T>
constexpr bool kPairSteps = kIsBf16<T>&& kHasDotPairs;

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

// kt [steps, rounded up to a multiple of 4 words][32] from 32 rows of keys.
template <class T, class Ahead>
void turn_keys(const char* const* rows, int head_dim, float* kt, Ahead& ahead) {
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

// scores[r][32] = scale * q[r] . kt, for R rows of q (a word a step).
template <class T, int R>
void score_tile(const uint32_t* q, int64_t q_stride, const float* kt, int step_count, float scale, float* scores,
                int64_t score_stride) {
  for (int p = 0; p < kAttentionBlock; p += 2 * kLanes) {
    V acc[R][2] = {};
    for (int d = 0; d < step_count; ++d) {
      const U k0 = load_bits(kt + d * kAttentionBlock + p), k1 = load_bits(kt + d * kAttentionBlock + p + kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const U word = set_bits(q[r * q_stride + d]);
        acc[r][0] = multiply_step<T>(acc[r][0], word, k0);
        acc[r][1] = multiply_step<T>(acc[r][1], word, k1);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      store(scores + r * score_stride + p, acc[r][0] * set(scale));
      store(scores + r * score_stride + p + kLanes, acc[r][1] * set(scale));
    }
  }
}

// What a tile of values needs: weights p[r][position], rows of values at values + offsets[position], and sums
// o[r][padded head] with the columns in the order of Pair.
template <class T>
struct Values {
  const float* p;
  int64_t p_stride;
  const T* values;
  const int64_t* offsets;
  float* o;
  int64_t o_stride;
};

// o[r] += p[r][i] * values[i] for positions [from, to), R rows, C pairs of vectors of columns; with n: one pair of n.
template <class T, int R, int C, class... N>
void value_tile(const Values<T>& a, int row, int from, int to, int column, N... n) {
  float* o = a.o + row * a.o_stride + column;
  const float* p = a.p + row * a.p_stride;
  V acc[R][C][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      acc[r][c][0] = load(o + r * a.o_stride + c * kPair);
      acc[r][c][1] = load(o + r * a.o_stride + c * kPair + kLanes);
    }
  for (int i = from; i < to; ++i) {
    const T* v = a.values + a.offsets[i] + column;
    Pair x[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) x[c] = load_pair(v + c * kPair, n...);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V weight = set(p[r * a.p_stride + i]);
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
      store(o + r * a.o_stride + c * kPair, acc[r][c][0]);
      store(o + r * a.o_stride + c * kPair + kLanes, acc[r][c][1]);
    }
}

// All columns of R rows; few rows take more columns at a time, so that enough chains are in flight.
template <class T, int R>
void value_rows(const Values<T>& a, int row, int from, int to, int head_dim) {
  constexpr int C = R * 4 <= kTileRows ? 4 : R * 2 <= kTileRows ? 2 : 1;
  int column = 0;
  for (; column + C * kPair <= head_dim; column += C * kPair) value_tile<T, R, C>(a, row, from, to, column);
  for (; column + kPair <= head_dim; column += kPair) value_tile<T, R, 1>(a, row, from, to, column);
  if (column < head_dim) value_tile<T, R, 1>(a, row, from, to, column, head_dim - column);
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
