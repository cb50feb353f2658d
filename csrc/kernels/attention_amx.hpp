// The two products of attention as tiles of AMX, for a cache in bf16. Bits depend on neither the rows that share a tile
// nor the side on which an operand stands: tdpbf16ps adds 16 pairs as linear_amx_few.hpp tells.
//
// Scores: one chain over the head's columns, 32 at a time.
// Weighted sums of V: a weight p (float32, 0 to 1) goes as two bf16, high = p rounded (half up) and low = the rest,
// p - high, rounded alike, so that what is lost is 2^-17 of it. A segment's sum starts from zero; each block of 32
// positions, in ascending order, adds high . v, then low . v, the pairs being positions j and j + 16. At the end 0 is
// added, which makes every zero positive: its sign would tell whether a masked value was negative.
//
// The weights of 32 positions take the place of their scores: 16 words of high, 16 words of low. Values of a block:
// [2 s, 2 s + 1: the even, the odd columns of strip s of 32][16 pairs][16 columns] words. Sums thus have their columns
// in the order of Pair.
#pragma once
#include "amx_tiles.hpp"
#include "attention_tiles.hpp"

namespace serried {
namespace {
namespace simd {

constexpr int kTileWords = 16 * 16;

namespace tiles = linear_detail::amx;

// The tile registers: tmm0 to tmm4 are full, tmm5 to tmm7 have as many rows as are asked for.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (rows_) asm volatile("tilerelease" ::: "memory");
  }
  void use(int rows) {
    if (rows == rows_) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16};
    } config;
    for (int i = 5; i < 8; ++i) config.rows[i] = static_cast<uint8_t>(rows);
    asm volatile("ldtilecfg %0" ::"m"(config));
    rows_ = rows;
  }

 private:
  int rows_ = 0;
};

// Scores.

// scores[16 kChunks][32] = q . kt, q: [rows][q_stride] words, 16 steps a time (steps beyond the head are zeros in
// both).
template <int kChunks>
inline void score_many(const uint32_t* q, int64_t q_stride, const float* kt, int step_count, float* scores) {
  tiles::zero<0>(), tiles::zero<1>(), tiles::zero<2>(), tiles::zero<3>();
  for (int d = 0; d < step_count; d += 16) {
    tiles::load<4>(q + d, 4 * q_stride);
    tiles::load<6>(kt + d * kAttentionBlock, 4 * kAttentionBlock);
    tiles::multiply_add<0, 4, 6>();
    tiles::load<7>(kt + d * kAttentionBlock + 16, 4 * kAttentionBlock);
    tiles::multiply_add<1, 4, 7>();
    if constexpr (kChunks > 1) {
      tiles::load<5>(q + 16 * q_stride + d, 4 * q_stride);
      tiles::multiply_add<2, 5, 6>();
      tiles::multiply_add<3, 5, 7>();
    }
  }
  tiles::store<0>(scores, 4 * kScoreStride);
  tiles::store<1>(scores + 16, 4 * kScoreStride);
  if constexpr (kChunks > 1) {
    tiles::store<2>(scores + 16 * kScoreStride, 4 * kScoreStride);
    tiles::store<3>(scores + 16 * kScoreStride + 16, 4 * kScoreStride);
  }
}

// The same bits with keys as the left operand, as they lie in the cache: scores[p][row] of kTiles * 16 positions for
// up to 16 rows. q: [step][rows]; what a tile reads beyond a step's rows makes columns that nobody reads.
template <int kTiles>
[[gnu::always_inline]] inline void score_keys(const char* const* keys, int64_t key_stride, const uint32_t* q, int rows,
                                              int step_count, float* scores, Ahead& ahead) {
  tiles::zero<0>(), tiles::zero<1>();
  for (int d = 0; d < step_count; d += 16) {
    tiles::load<4>(q + d * rows, 4 * int64_t{rows});
    tiles::load<2>(keys[0] + 4 * d, key_stride);
    if constexpr (kTiles > 1) tiles::load<3>(keys[1] + 4 * d, key_stride);
    tiles::multiply_add<0, 2, 4>();
    if constexpr (kTiles > 1) tiles::multiply_add<1, 3, 4>();
    ahead.fetch(kTiles * 1024);
  }
  tiles::store<0>(scores, 64);
  if constexpr (kTiles > 1) tiles::store<1>(scores + 256, 64);
}

// scores[row][16] from [16 positions][16].
inline void turn_scores(const float* from, int rows, float* scores) {
  const char* row[16];
  for (int i = 0; i < 16; ++i) row[i] = reinterpret_cast<const char*>(from + 16 * i);
  for (int r = 0; r < rows; r += 4) {
    V t[4];
    for (int i = 0; i < 4; ++i) t[i] = load_pieces(row + i, 4 * int64_t{r});
    turn(t);
    for (int i = 0; i < 4 && r + i < rows; ++i) store(scores + (r + i) * kScoreStride, t[i]);
  }
}

// Weighted sums of V.

// e^x for x <= 0, within 2^-22; below 2^-126 it is 0 (threads flush denormals); NaN stays NaN.
inline V exp_weight(V x) {
  x = max(set(-88.0f), x);
  const V t = fma(x, set(1.44269504088896341f), set(kMagic)), r = fma(t - set(kMagic), set(-0.693147181f), x);
  V p = fma(set(8.312503807e-03f), r, set(4.189033434e-02f));
  p = fma(p, r, set(1.666711569e-01f));
  p = fma(p, r, set(4.999923110e-01f));
  p = fma(p, r * r, r) + set(1.0f);
  return scale_by_power(p, t);
}

// The weights a (positions 0 to 15), b (16 to 31) as words of bf16.
inline void split_weights(V a, V b, float* to) {
  const U half = set_bits(0x8000u), mask = set_bits(0xffff0000u);
  const U high_a = ((U)a + half) & mask, high_b = ((U)b + half) & mask;
  const U low_a = (U)(a - (V)high_a) + half, low_b = (U)(b - (V)high_b) + half;
  store_bits(to, (high_a >> 16) | high_b);
  store_bits(to + 16, (low_a >> 16) | (low_b & mask));
}

// The values of a block: base[offsets[p]...] of head_dim columns for the positions [low, high), zeros for the others,
// whose memory is not read.
[[gnu::noinline]] void pack_block(const Bf16* base, const int64_t* offsets, int low, int high, int head_dim,
                                  uint32_t* to, Ahead& ahead) {
  static constexpr Bf16 kNothing[kMaxHeadDim] = {};
  const U mask = set_bits(0xffffu);
  const auto row = [&](int p) { return p >= low && p < high ? base + offsets[p] : kNothing; };
  Ahead fetcher = ahead;
  for (int j = 0; j < 16; ++j, to += 16) {
    const Bf16 *a = row(j), *b = row(j + 16);
    uint32_t* tile = to;
    const auto put = [&](U x, U y) {
      store_bits(tile, (x & mask) | (y << 16));
      store_bits(tile + kTileWords, (x >> 16) | (y & ~mask));
      tile += 2 * kTileWords;
    };
    int c = 0;
    for (; c + 32 <= head_dim; c += 32) {
      fetcher.fetch(64);
      put(load_bits(a + c), load_bits(b + c));
    }
    if (c < head_dim) put(load_bits(a + c, (head_dim - c) / 2), load_bits(b + c, (head_dim - c) / 2));
  }
  ahead = fetcher;
}

// Whether a packed block holds neither NaN nor infinity.
inline bool finite(const uint32_t* values, int64_t dim) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < 16 * dim; i += 16) {
    const __m512i x = _mm512_loadu_si512(values + i);
    most = _mm512_max_epu16(most, _mm512_add_epi16(x, x));  // without the sign
  }
  return _mm512_cmp_epu16_mask(most, _mm512_set1_epi16(static_cast<short>(0xff00)), _MM_CMPINT_NLT) == 0;
}

// sums += weights . values of one block, for the rows in use. first: from zero.
inline void add_block(const float* weights, const uint32_t* values, int64_t dim, float* sums, bool first,
                      Ahead& ahead) {
  tiles::load<5>(weights, 4 * kScoreStride);
  tiles::load<6>(weights + 16, 4 * kScoreStride);
  for (int64_t c = 0; c < dim; c += 16, values += kTileWords, sums += 16) {
    ahead.fetch(512);
    first ? tiles::zero<7>() : tiles::load<7>(sums, 4 * dim);
    tiles::load<2>(values, 64);
    tiles::multiply_add<7, 5, 2>();
    tiles::multiply_add<7, 6, 2>();
    tiles::store<7>(sums, 4 * dim);
  }
}

// The same for `blocks` blocks from zero, and 16 kChunks rows.
template <int kChunks>
inline void add_blocks(const float* weights, const uint32_t* values, int blocks, int64_t dim, float* sums) {
  for (int64_t c = 0; c < dim; c += 32, values += 2 * kTileWords, sums += 32) {
    const float* w = weights;
    const uint32_t* v = values;
    tiles::zero<0>(), tiles::zero<1>(), tiles::zero<2>(), tiles::zero<3>();
    const auto add = [&](const float* part) __attribute__((always_inline)) {
      tiles::load<4>(part, 4 * kScoreStride);
      tiles::multiply_add<0, 4, 6>();
      tiles::multiply_add<1, 4, 7>();
      if constexpr (kChunks > 1) {
        tiles::load<5>(part + 16 * kScoreStride, 4 * kScoreStride);
        tiles::multiply_add<2, 5, 6>();
        tiles::multiply_add<3, 5, 7>();
      }
    };
    for (int b = 0; b < blocks; ++b, w += kAttentionBlock, v += 16 * dim) {
      tiles::load<6>(v, 64);
      tiles::load<7>(v + kTileWords, 64);
      add(w);
      add(w + 16);
    }
    tiles::store<0>(sums, 4 * dim);
    tiles::store<1>(sums + 16, 4 * dim);
    if constexpr (kChunks > 1) {
      tiles::store<2>(sums + 16 * dim, 4 * dim);
      tiles::store<3>(sums + 16 * dim + 16, 4 * dim);
    }
  }
}

}  // namespace simd
}  // namespace
}  // namespace serried
