// Quantized weights by AMX: up to 16 tokens times 32 outputs, over up to four groups of 32 k.
//
// A tile instruction multiplies 16 tokens by 16 outputs over the 32 bytes of one group: exact integers, to which the
// float operations of quant_group.hpp are applied in their order, so the bits are those of the vectors. What costs is
// not the multiplication: its sums go through memory (a tile has no other way out), and while tiles are in use, the
// processor multiplies 512-bit vectors at half its rate, one a cycle, two of which every sum needs. So
//   a unit's eight multiplications are interleaved with the float operations of the unit before it, a piece each: two
//   tiles of sums, eight tokens, which share the broadcast of a token's scale;
//   sums become floats by an integer addition, which the other port does: 2^23 * 1.5 + sum is a float's bits, and
//   fma(that, scale, -2^23 * 1.5 * scale) rounds once, to what float(sum) * scale is (a scale has 11 bits: exact);
//   a tile is stored two multiplications later, when it is done.
//
// Where a group is fine for some of the tokens, their sums in the stored tile become 8 * sum + low sum before they are
// added up. The low sums of all tokens of a chunk come from tiles of their own: see quant_amx_fine.hpp.
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "amx_tiles.hpp"
#include "kernels.hpp"
#include "linear_drive.hpp"
#include "linear_quant.hpp"

namespace serried {
namespace {
namespace linear_detail {
namespace amx {

constexpr int kUnitGroups = 4;
constexpr int kBlockGroups = 8;  // see quant_amx_walk.hpp
constexpr int kUnitOutputs = 32;
constexpr int kUnitFloats = kRows * kUnitOutputs;        // its sums: [16 tokens][32 outputs]
constexpr int kGroupX = kRows * kGroup;                  // bytes of x in a group: [16 tokens][32]
constexpr int kGroupWeights = kGroup * kUnitOutputs;     // bytes: [8][32 outputs][4], signed
constexpr int kLowBytes = kUnitOutputs * 4;              // of a token's low sums
constexpr int kGroupTiles = 4 * kRows * 64;              // bytes of the ring
constexpr int kGroupScales = 3 * kTile;                  // floats: scales, -kMagic * scales, minimums
constexpr int kGroupScalesX = 2 * kRows;                 // floats: scales, scales * sums of x
constexpr int32_t kMagicBits = 0x4b400000;               // of 2^23 * 1.5
constexpr float kMagic = 12582912.0f;

// A token for which a group is fine: where its sums are. Both in bytes; groups are counted from the first input.
struct FineToken {
  int32_t tile;  // in the tiles of a unit, kGroupTiles a group
  int32_t low;   // in the low sums: int32 [32 outputs]
};

struct QuantUnit {
  const char* x;
  const char* weights;
  const float* x_scales;
  const float* w_scales;  // of the first of the outputs
  const FineToken *fine = nullptr, *fine_end = nullptr;
  int64_t tile_shift;  // what to add to their `tile`
  const char* low;     // what their `low` is relative to
  int32_t groups = 0;
  float* sums;  // those so far; then, like Segment's slot, the place in a stack
  bool resumes, ends_leaf, ends_node;
  int32_t pops;
  float* y;           // of the first token and output
  const float* bias;  // of the first output, or null
};

// The prefetch of weights to L2, four pages side by side (see linear_amx.hpp), beside a walk of its own speed.
struct AheadWalk {
  static constexpr int64_t kLead = 16384, kPages = 4;
  const char *begin = nullptr, *at = nullptr, *end = nullptr;
  int64_t steps = 0;  // of 256 bytes

  AheadWalk() = default;
  AheadWalk(const char* weights, const char* end) : begin(weights + kLead), at(begin), end(end) {}
  [[gnu::always_inline]] void step() {
    ++steps;
    if (at >= end) return;
#pragma GCC unroll 4
    for (int page = 0; page < kPages; ++page) _mm_prefetch(at + page * kPage, _MM_HINT_T1);
    at += 64;
    if ((at - begin) % kPage == 0) at += (kPages - 1) * kPage;
  }
};

template <bool kMinimum>
struct QuantTiles {
  int32_t tokens;
  int64_t x_stride, x_step;  // of x: bytes between tokens, between groups
  int64_t y_stride;          // floats between two tokens of one node
  int64_t slot_floats;       // between the slots of a stack
  bool stream;               // y goes past the caches
  AheadWalk ahead;
  int32_t ahead_steps = 0;   // beside each multiplication
  QuantUnit units[3];
  QuantUnit* order[3] = {units, units + 1, units + 2};  // two that are being added up, then the one that is multiplied
  int parity = 0;
  // Tiles of integer sums. Those of one unit lie in the lower halves of pages, the next one's in the upper: a load that
  // is 4 KB from a store which still waits would wait for it.
  alignas(4096) char ring[kUnitGroups][2][2][kRows * 64];

  // The unit to fill in, and then to run. In place: a copy would read with one instruction what several wrote, and so
  // wait until all stores before have left for the cache.
  QuantUnit& next() { return *order[2]; }
  void run() {
    QuantUnit &now = *order[2], &before = *order[1], &last = *order[0];
    const bool full = std::min({now.groups, before.groups, last.groups}) == kUnitGroups && tokens > 8;
    if (full) {
      parity ? turn<1, true>(now, before, last) : turn<0, true>(now, before, last);
    } else {
      parity ? turn<1, false>(now, before, last) : turn<0, false>(now, before, last);
    }
    parity ^= 1;
    std::rotate(order, order + 1, order + 3);
  }
  void finish() {
    for (int i = 0; i < 2; ++i) {
      next().groups = 0;
      next().fine = next().fine_end = nullptr;
      run();
    }
  }

 private:
  using Sums = __m512[8][2];

  // Multiplies `now`, and adds up the second half of the tokens of `last`, then the first half of those of `before`.
  // kFull: no part is missing, so that nothing is asked.
  template <int kParity, bool kFull>
  void turn(const QuantUnit& now, const QuantUnit& before, const QuantUnit& last) {
    half_turn<kParity, kFull, 0>(now, last);
    refine(before, ring[0][!kParity][0]);  // its last tile has just been stored
    half_turn<kParity, kFull, 4>(now, before);
  }

  // Multiplications [kAt, kAt + 4) of `now`, beside eight tokens of `adding`.
  template <int kParity, bool kFull, int kAt>
  [[gnu::always_inline]] inline void half_turn(const QuantUnit& now, const QuantUnit& adding) {
    constexpr int kFirst = kAt == 0 ? 8 : 0;
    Sums sum;
    const bool adds = kFull || (adding.groups > 0 && kFirst < tokens);
    if (adds) begin_sums<kFirst>(adding, sum);
    piece<kParity, kFull, kAt>(now, adding, adds, sum);
    piece<kParity, kFull, kAt + 1>(now, adding, adds, sum);
    piece<kParity, kFull, kAt + 2>(now, adding, adds, sum);
    piece<kParity, kFull, kAt + 3>(now, adding, adds, sum);
    if (adds) end_sums<kFirst>(adding, sum);
  }

  // Multiplication kAt of `now`, beside group kAt % 4 of `adding`; the tile of the multiplication four before is stored.
  template <int kParity, bool kFull, int kAt>
  [[gnu::always_inline]] inline void piece(const QuantUnit& now, const QuantUnit& adding, bool adds, Sums& sum) {
    constexpr int kGroupAt = kAt / 2, kPart = kAt % 4, kTiles = 2 * kUnitGroups, kDone = (kAt + 4) % kTiles;
    constexpr int kFrom = kAt < 4 ? kParity : !kParity, kTo = !kFrom, kFirst = kAt < 4 ? 8 : 0;
    const bool multiplies = kFull || kGroupAt < now.groups;
    adds = kFull || (adds && kPart < adding.groups);
    const char* tiles = ring[kPart][kFrom][0] + kFirst * 64;
    const float* x = adding.x_scales + kPart * kGroupScalesX + kFirst;
    Scales w;
    if (adds) w = Scales(adding.w_scales + kPart * kGroupScales);
    for (int32_t i = ahead_steps; i > 0; --i) ahead.step();
    store<kPart>(ring[kDone / 2][kTo][kDone % 2], 64);
    if (multiplies) zero<kPart>();
    if (adds) add_rows<0, 2>(tiles, w, x, sum);
    if (multiplies && kAt % 2 == 0) load<4>(now.x + kGroupAt * x_step, x_stride);
    if (adds) add_rows<2, 4>(tiles, w, x, sum);
    if (multiplies) load<6 + kAt % 2>(now.weights + kGroupAt * kGroupWeights + kAt % 2 * 64, 128);
    if (adds) add_rows<4, 6>(tiles, w, x, sum);
    if (multiplies) multiply_add_bytes<kPart, 4, 6 + kAt % 2>();
    if (adds) add_rows<6, 8>(tiles, w, x, sum);
  }

  // The sums of tokens for which a group is fine, in the stored tiles of a unit.
  static void refine(const QuantUnit& unit, char* tiles) {
    for (const FineToken* token = unit.fine; token < unit.fine_end; ++token) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        auto* sums = reinterpret_cast<Ints*>(tiles + unit.tile_shift + token->tile + j * kRows * 64);
        *sums = *sums * kFineSteps + *reinterpret_cast<const Ints*>(unit.low + token->low + j * 64);
      }
    }
  }

  // Of a group's 32 outputs.
  struct Scales {
    __m512 scale[2], shift[2], minimum[2];
    Scales() = default;
    explicit Scales(const float* w) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        scale[j] = _mm512_load_ps(w + 16 * j);
        shift[j] = _mm512_load_ps(w + kTile + 16 * j);
        if (kMinimum) minimum[j] = _mm512_load_ps(w + 2 * kTile + 16 * j);
      }
    }
  };

  template <int kBegin, int kEnd>
  [[gnu::always_inline]] static inline void add_rows(const char* tiles, const Scales& w, const float* x, Sums& sum) {
    const __m512i magic = _mm512_set1_epi32(kMagicBits);
#pragma GCC unroll 8
    for (int m = kBegin; m < kEnd; ++m) {
      const __m512 scale_x = _mm512_set1_ps(x[m]);
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const __m512i integers = _mm512_add_epi32(_mm512_load_si512(tiles + j * kRows * 64 + m * 64), magic);
        sum[m][j] = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_castsi512_ps(integers), w.scale[j], w.shift[j]), scale_x, sum[m][j]);
      }
      if (!kMinimum) continue;
      const __m512 sum_x = _mm512_set1_ps(x[kRows + m]);
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) sum[m][j] = _mm512_fmadd_ps(w.minimum[j], sum_x, sum[m][j]);
    }
  }

  template <int kFirst>
  [[gnu::always_inline]] inline void begin_sums(const QuantUnit& unit, Sums& sum) const {
    const float* from = unit.sums + kFirst * kUnitOutputs;
    const bool resumes = unit.resumes;
#pragma GCC unroll 8
    for (int m = 0; m < 8; ++m) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j)
        sum[m][j] = resumes ? _mm512_load_ps(from + m * kUnitOutputs + 16 * j) : _mm512_setzero_ps();
    }
  }

  // See end_leaf in linear_lanes.hpp.
  template <int kFirst>
  [[gnu::always_inline]] inline void end_sums(const QuantUnit& unit, Sums& sum) const {
    float* top = unit.sums + kFirst * kUnitOutputs;
    if (!unit.ends_leaf) return put<kFirst>(sum, top, kUnitOutputs, false);
    for (int32_t p = 0; p < unit.pops; ++p) {
      top -= slot_floats;
#pragma GCC unroll 8
      for (int m = 0; m < 8; ++m) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j)
          sum[m][j] = _mm512_add_ps(_mm512_load_ps(top + m * kUnitOutputs + 16 * j), sum[m][j]);
      }
    }
    if (!unit.ends_node) return put<kFirst>(sum, top, kUnitOutputs, false);
    if (unit.bias) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const __m512 bias = _mm512_loadu_ps(unit.bias + 16 * j);
#pragma GCC unroll 8
        for (int m = 0; m < 8; ++m) sum[m][j] = _mm512_add_ps(sum[m][j], bias);
      }
    }
    put<kFirst>(sum, unit.y + kFirst * y_stride, y_stride, true);
  }

  template <int kFirst>
  [[gnu::always_inline]] inline void put(const Sums& sum, float* to, int64_t stride, bool is_y) const {
#pragma GCC unroll 8
    for (int m = 0; m < 8; ++m, to += stride) {
      if (is_y && kFirst + m >= tokens) return;
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        if (is_y && stream) {
          _mm512_stream_ps(to + 16 * j, sum[m][j]);
        } else {
          _mm512_storeu_ps(to + 16 * j, sum[m][j]);
        }
      }
    }
  }
};

}  // namespace amx
}  // namespace linear_detail
}  // namespace
}  // namespace serried
