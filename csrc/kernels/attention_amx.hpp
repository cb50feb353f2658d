// The two products of attention as tiles of AMX, for a cache in bf16. Bits depend on neither the rows that share a tile
// nor the side on which an operand stands: tdpbf16ps adds 16 pairs as linear_amx_few.hpp tells.
//
// Scores: one chain over the head's columns, 32 at a time.
// Weighted sums of V: a weight p (float32, 0 to 1) goes as two bf16, high = p rounded (half up) and low = the rest,
// p - high, rounded alike, so that what is lost is 2^-17 of it. Each of them has a chain of its own from zero over the
// blocks of 32 positions of a segment, a block being the 16 pairs of positions j, j + 16; then high + low + 0 (which
// makes every zero positive: its sign would tell whether a masked value was negative).
//
// Weights of a block: a row of 16 words, pairs of positions. Values of a block: [2 s, 2 s + 1: the even, the odd columns
// of strip s of 32][16 pairs][16 columns] words. Sums thus have their columns in the order of Pair.
#pragma once
#include "attention_tiles.hpp"

namespace serried {
namespace {
namespace simd {

constexpr int kTileWords = 16 * 16;

// Assembly rather than intrinsics: GCC 12's tile loads do not tell the compiler that they read memory.
template <int kRegister>
inline void load_tile(const void* data, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(data), "r"(stride), "i"(kRegister) : "memory");
}
template <int kRegister>
inline void store_tile(void* data, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(data), "r"(stride), "i"(kRegister) : "memory");
}
template <int kRegister>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kRegister) : "memory");
}
template <int kSum, int kLeft, int kRight>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight) : "memory");
}

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

// scores[16 kBlocks][32] = q . kt, q: [rows][q_stride] words, 16 steps a time (steps beyond the head are zeros in both).
template <int kBlocks>
inline void score_many(const uint32_t* q, int64_t q_stride, const float* kt, int step_count, float* scores) {
  zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  for (int d = 0; d < step_count; d += 16) {
    load_tile<4>(q + d, 4 * q_stride);
    load_tile<6>(kt + d * kAttentionBlock, 4 * kAttentionBlock);
    multiply_tiles<0, 4, 6>();
    load_tile<7>(kt + d * kAttentionBlock + 16, 4 * kAttentionBlock);
    multiply_tiles<1, 4, 7>();
    if constexpr (kBlocks > 1) {
      load_tile<5>(q + 16 * q_stride + d, 4 * q_stride);
      multiply_tiles<2, 5, 6>();
      multiply_tiles<3, 5, 7>();
    }
  }
  store_tile<0>(scores, 4 * kScoreStride);
  store_tile<1>(scores + 16, 4 * kScoreStride);
  if constexpr (kBlocks > 1) {
    store_tile<2>(scores + 16 * kScoreStride, 4 * kScoreStride);
    store_tile<3>(scores + 16 * kScoreStride + 16, 4 * kScoreStride);
  }
}

// The same bits with keys as the left operand, as they lie in the cache: scores[p][row] of kTiles * 16 positions for
// up to 16 rows. q: [step][rows]; what a tile reads beyond a step's rows makes columns that nobody reads.
template <int kTiles>
[[gnu::always_inline]] inline void score_keys(const char* const* keys, int64_t key_stride, const uint32_t* q, int rows,
                                              int step_count, float* scores, Ahead& ahead) {
  zero_tile<0>(), zero_tile<1>();
  for (int d = 0; d < step_count; d += 16) {
    load_tile<4>(q + d * rows, 4 * int64_t{rows});
    load_tile<2>(keys[0] + 4 * d, key_stride);
    if constexpr (kTiles > 1) load_tile<3>(keys[1] + 4 * d, key_stride);
    multiply_tiles<0, 2, 4>();
    if constexpr (kTiles > 1) multiply_tiles<1, 3, 4>();
    ahead.fetch(kTiles * 1024);
  }
  store_tile<0>(scores, 64);
  if constexpr (kTiles > 1) store_tile<1>(scores + 256, 64);
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

// The weights of a block, p[32], as words of bf16.
inline void split_weights(const float* p, uint32_t* high, uint32_t* low) {
  const U a = (U)load(p), b = (U)load(p + 16), half = set_bits(0x8000u), mask = set_bits(0xffff0000u);
  const U high_a = (a + half) & mask, high_b = (b + half) & mask;
  const U low_a = (U)((V)a - (V)high_a) + half, low_b = (U)((V)b - (V)high_b) + half;
  store_bits(high, (high_a >> 16) | high_b);
  store_bits(low, (low_a >> 16) | (low_b & mask));
}

// The values of a block: rows[p] of head_dim columns, or null for a position that must not be read, which becomes zeros.
[[gnu::noinline]] void pack_block(const Bf16* const* rows, int head_dim, uint32_t* to, Ahead ahead) {
  static constexpr Bf16 kNothing[kMaxHeadDim] = {};
  const U mask = set_bits(0xffffu);
  for (int j = 0; j < 16; ++j, to += 16) {
    const Bf16* a = rows[j] ? rows[j] : kNothing;
    const Bf16* b = rows[j + 16] ? rows[j + 16] : kNothing;
    uint32_t* tile = to;
    const auto put = [&](U x, U y) {
      store_bits(tile, (x & mask) | (y << 16));
      store_bits(tile + kTileWords, (x >> 16) | (y & ~mask));
      tile += 2 * kTileWords;
    };
    int c = 0;
    for (; c + 32 <= head_dim; c += 32) {
      ahead.fetch(128);
      put(load_bits(a + c), load_bits(b + c));
    }
    if (c < head_dim) put(load_bits(a + c, (head_dim - c) / 2), load_bits(b + c, (head_dim - c) / 2));
  }
  ahead.fetch_rest();
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

// sums += weights . values of one block, for the rows in use (kParts: 1, or 2 such tiles, `apart` rows from each other).
// first: from zero.
template <int kParts>
inline void add_block(const uint32_t* weights, const uint32_t* values, int64_t dim, float* sums, int apart, bool first) {
  const auto add = [&](auto part, const uint32_t* at, float* to) {
    constexpr int kSum = 6 + decltype(part)::value;
    first ? zero_tile<kSum>() : load_tile<kSum>(to, 4 * dim);
    load_tile<2>(at, 64);
    multiply_tiles<kSum, 5, 2>();
    store_tile<kSum>(to, 4 * dim);
  };
  for (int p = 0; p < kParts; ++p) {
    load_tile<5>(weights + p * apart * 16, 64);
    for (int64_t c = 0; c < dim; c += 32) {
      add(std::integral_constant<int, 0>{}, values + c * 16, sums + p * apart * dim + c);
      add(std::integral_constant<int, 1>{}, values + c * 16 + kTileWords, sums + p * apart * dim + c + 16);
    }
  }
}

// sums[32][dim], 16 rows by high weights and 16 by low ones, of `blocks` blocks. weights: [blocks][32 rows][16].
inline void add_many(const uint32_t* weights, const uint32_t* values, int blocks, int64_t dim, float* sums) {
  for (int64_t c = 0; c < dim; c += 32) {
    const uint32_t *w = weights, *v = values + c * 16;
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    for (int b = 0; b < blocks; ++b, w += 2 * kTileWords, v += 16 * dim) {
      load_tile<4>(w, 64);
      load_tile<6>(v, 64);
      multiply_tiles<0, 4, 6>();
      load_tile<7>(v + kTileWords, 64);
      multiply_tiles<1, 4, 7>();
      load_tile<5>(w + kTileWords, 64);
      multiply_tiles<2, 5, 6>();
      multiply_tiles<3, 5, 7>();
    }
    store_tile<0>(sums + c, 4 * dim);
    store_tile<1>(sums + c + 16, 4 * dim);
    store_tile<2>(sums + 16 * dim + c, 4 * dim);
    store_tile<3>(sums + 16 * dim + c + 16, 4 * dim);
  }
}

}  // namespace simd
}  // namespace
}  // namespace serried
