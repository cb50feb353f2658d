// Quantized linears by AMX for the tokens of a batch in decode: weights come from memory once, at one even pace, while
// all tokens are multiplied. (QuantWalk, which is for more, unpacks weights first; that pays for many tokens only.)
//
// The integers are those of quant_group.hpp: unsigned weights times signed x (tdpbsud), so int8 is multiplied where it
// lies. Sums become floats as in quant_amx.hpp; what the offset of the weights asks to be taken off is part of the integer
// that is added there. A unit is a group of a leaf, or two. Its tiles of sums are stored four multiplications later, when
// they are done, and added up while the next unit is multiplied, when they have left the store buffer.
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "amx_tiles.hpp"
#include "int8_row.hpp"
#include "linear_drive.hpp"
#include "linear_quant_sets.hpp"
#include "quant_amx.hpp"
#include "quant_group.hpp"

namespace serried {
namespace {
namespace linear_detail {
namespace amx {

constexpr int32_t kFewSets = 3;  // of 16 tokens: more go by QuantWalk

struct FewUnit {
  int64_t at;          // its first group of the inputs
  const char* weight;  // there
  int32_t groups = 0, pops;
  bool begins;                      // the chain of sums
  bool ends, ends_leaf, ends_node;  // the segment; see Segment
  float *slot, *y;                  // of the first set
  const float* bias;
};
// A token for which a group is fine.
struct FewFine {
  int32_t group, token;  // of the inputs; of the set
};

// M tokens in each of kSets tiles; the last one ends with the last token.
template <Format kFormat, int M, int kSets>
struct FewKernel : QuantGroup<kFormat, M, kVectors> {
  using Group = QuantGroup<kFormat, M, kVectors>;
  using Group::ahead, Group::row_stride, Group::x_stride, Group::y_stride, Group::kGroupBytes, Group::kMinimum,
      Group::kOffset, Group::kValueBytes;
  static constexpr int kElement = 1;
  static constexpr int32_t kBatch = 1, kGroupInputs = 512;  // there is one block
  static constexpr bool kOneLeaf = false;
  static constexpr bool kUnpacks = kFormat != Format::kInt8;
  static constexpr int kUnit = kSets == 1 ? 2 : 1;  // two groups of two sets would crowd the L1 cache
  static constexpr int kTileBytes = M * 64;
  static constexpr int kParts = (kMinimum ? 3 : 2) * kRows;

  int32_t tokens, groups;  // groups: of the inputs
  const float* x_parts;    // [groups][sets][scale, what is added to a sum (as bits), scale * sum of x][16 tokens]
  const FewFine* fines;    // by set and group
  const int32_t* starts;   // [sets][groups + 1] of those
  const char* x;           // the first token's row
  FewUnit units[2];
  int parity = 0;
  char* pending[4];        // where tmm0 to tmm3 belong
  alignas(64) float stack[kSets][kStackDepth][M][kTile];
  alignas(64) float w_scales[2][kUnit][3][kTile];  // scales, -kMagic * scales, minimums
  alignas(64) char values[kUnit][8 * kStepBytes];
  alignas(4096) char ring[2][kSets][kUnit][4][kTileBytes];

  float* slot(int32_t, int32_t depth) { return stack[0][depth][0]; }

  void run(const Segment& s) {
    for (int32_t k = 0; k < s.inputs; k += kUnit * kGroup) {
      FewUnit& unit = units[parity];
      unit.at = (s.k + k) / kGroup;
      unit.weight = s.weight + k / kGroup * kGroupBytes;
      unit.groups = std::min(kUnit, (s.inputs - k) / kGroup);
      unit.pops = s.pops;
      unit.begins = k == 0 && !s.resumes;
      unit.ends = k + unit.groups * kGroup == s.inputs;
      unit.ends_leaf = s.ends_leaf;
      unit.ends_node = s.ends_node;
      unit.slot = s.slot;
      unit.y = s.y;
      unit.bias = s.bias;
      multiply_unit(unit);
      parity ^= 1;
      add_unit();
    }
  }
  void begin() {
    for (char*& place : pending) place = ring[1][0][0][0];  // nothing of worth is stored there at first
  }
  void finish() {
    store<0>(pending[0], 64);
    store<1>(pending[1], 64);
    store<2>(pending[2], 64);
    store<3>(pending[3], 64);
    parity ^= 1;
    add_unit();
  }

  // Room for what is prepared of x.
  static int64_t bytes_of(int32_t groups) {
    return int64_t{groups + 1} * kSets * (kParts + 1) * 4 + int64_t{groups} * kSets * M * sizeof(FewFine);
  }
  void prepare_x(char* to, const char* first, int32_t inputs) {
    x = first, groups = inputs / kGroup;
    auto* parts = reinterpret_cast<float*>(to);
    auto* start = reinterpret_cast<int32_t*>(parts + int64_t{groups} * kSets * kParts);
    auto* fine = reinterpret_cast<FewFine*>(start + kSets * (groups + 1));
    x_parts = parts, starts = start, fines = fine;
    for (int set = 0; set < kSets; ++set) {
      for (int32_t g = 0; g < groups; ++g) {
        *start++ = static_cast<int32_t>(fine - fines);
        for (int m = 0; m < M; ++m) {
          const auto own = row(set, m);
          float* part = parts + (int64_t{g} * kSets + set) * kParts + m;
          part[0] = own.scales[g];
          part[kRows] = __builtin_bit_cast(float, kMagicBits - kOffset * own.sums[g]);
          if (kMinimum) part[2 * kRows] = own.scales[g] * static_cast<float>(own.sums[g]);
          if (own.fine[g]) *fine++ = {g, m};
        }
      }
      *start++ = static_cast<int32_t>(fine - fines);
    }
  }

 private:
  int32_t set_token(int set) const { return std::min(set * M, tokens - M); }
  Int8Row<const char> row(int set, int m) const { return {x + (set_token(set) + m) * row_stride, x_stride}; }

  void multiply_unit(const FewUnit& unit) {
    const char* group = unit.weight;
    const char* from = x + unit.at * kGroup;
    if constexpr (kUnpacks) {
      for (int32_t g = 0; g < unit.groups; ++g) unpack(group + g * kGroupBytes, values[g]);
    }
    for (int32_t g = 0; g < unit.groups; ++g, group += kGroupBytes, from += kGroup) {
      const char* weights = kUnpacks ? values[g] : group;
      if (kSets <= 2) load<4>(from, row_stride);
      if (kSets == 2) load<5>(from + set_token(1) * row_stride, row_stride);
      multiply_quarter<0>(group, weights, from, g);
      multiply_quarter<1>(group, weights, from, g);
      scales_of(group + kValueBytes, w_scales[parity][g]);
      multiply_quarter<2>(group, weights, from, g);
      multiply_quarter<3>(group, weights, from, g);
      ahead.rest(group, kGroupBytes, kValueBytes / kStepBytes);
    }
  }
  // 16 outputs of group g of the unit. from: the first token's x.
  template <int kQuarter>
  [[gnu::always_inline]] inline void multiply_quarter(const char* group, const char* weights, const char* from, int32_t g) {
    constexpr int kSteps = kValueBytes / kStepBytes / 4;
    for (int f = 0; f < kSteps; ++f) ahead.step(group + (kQuarter * kSteps + f) * kStepBytes);
    load<6 + kQuarter % 2>(weights + kQuarter * 64, kStepBytes);
    multiply<kQuarter, 0>(from, g);
    if constexpr (kSets > 1) multiply<kQuarter, 1>(from, g);
    if constexpr (kSets > 2) multiply<kQuarter, 2>(from, g);
  }
  template <int kQuarter, int kSet>
  [[gnu::always_inline]] inline void multiply(const char* from, int32_t g) {
    constexpr int kTurn = kQuarter * kSets + kSet, kSum = kTurn % 4, kX = 4 + (kSets <= 2 ? kSet : kTurn % 2);
    if (kSets > 2) load<kX>(from + set_token(kSet) * row_stride, row_stride);
    store<kSum>(pending[kSum], 64);
    zero<kSum>();
    multiply_add_mixed<kSum, kX, 6 + kQuarter % 2>();
    pending[kSum] = ring[parity][kSet][g][kQuarter];
  }

  static void unpack(const char* group, char* to) {
    for (int i = 0; i < 16; ++i) {
      const Bytes w = load_bytes(group + 64 * i);
      *reinterpret_cast<Bytes*>(to + 64 * i) = low_halves(w);
      *reinterpret_cast<Bytes*>(to + 1024 + 64 * i) = high_halves(w);
    }
  }
  static void scales_of(const char* halves, float (&to)[3][kTile]) {
    for (int o = 0; o < kTile; o += 16) {
      const __m512 scale = load_halves(halves + 2 * o);
      _mm512_store_ps(to[0] + o, scale);
      _mm512_store_ps(to[1] + o, _mm512_mul_ps(scale, _mm512_set1_ps(-kMagic)));
      if (kMinimum) _mm512_store_ps(to[2] + o, load_halves(halves + 2 * kTile + 2 * o));
    }
  }

  // Of the other parity.
  void add_unit() {
    FewUnit& unit = units[parity];
    if (unit.groups == 0) return;
    for (int set = 0; set < kSets; ++set) {
      refine(unit, set);
      Segment s{};
      s.ends_leaf = unit.ends_leaf;
      s.pops = unit.pops;
      s.ends_node = unit.ends_node;
      s.slot = unit.slot + int64_t{set} * kStackDepth * M * kTile;
      s.y = unit.y + set_token(set) * y_stride;
      s.bias = unit.bias;
      add_rows<0>(unit, set, s);
    }
    unit.groups = 0;
  }

  // The sums of tokens for which a group is fine.
  void refine(const FewUnit& unit, int set) {
    const int32_t* start = starts + set * (groups + 1) + unit.at;
    for (const FewFine *fine = fines + start[0], *end = fines + start[unit.groups]; fine < end; ++fine) {
      const int64_t g = fine->group - unit.at;
      refine_one(unit.weight + g * kGroupBytes, row(set, fine->token).low + fine->group * kGroup,
                 ring[parity][set][g][0] + fine->token * 64);
    }
  }
  [[gnu::noinline]] static void refine_one(const char* weight, const int8_t* low, char* sums) {
    Ints own[1][kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) own[0][j] = *reinterpret_cast<const Ints*>(sums + j * kTileBytes) * kFineSteps;
    GroupSums<kFormat, 1, kVectors>::add(weight, reinterpret_cast<const char*>(low), 0, own, [](int) {});
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) *reinterpret_cast<Ints*>(sums + j * kTileBytes) = own[0][j];
  }

  // Four tokens at a time, from kFirst on.
  template <int kFirst>
  [[gnu::always_inline]] inline void add_rows(const FewUnit& unit, int set, const Segment& s) {
    constexpr int kCount = std::min(4, M - kFirst);
    Segment own = s;
    own.slot += kFirst * kTile;
    own.y += kFirst * y_stride;
    Floats sum[kCount][kVectors];
    begin_sums<kCount, kVectors>(own, 0, unit.begins, sum);
    for (int32_t g = 0; g < unit.groups; ++g) {
      const float* parts = x_parts + ((unit.at + g) * kSets + set) * kParts + kFirst;
      add_group<kCount>(ring[parity][set][g][0] + kFirst * 64, w_scales[parity][g], parts, sum);
    }
    end_sums<kCount, kVectors, M>(own, 0, unit.ends, y_stride, sum);
    if constexpr (kFirst + 4 < M) add_rows<kFirst + 4>(unit, set, s);
  }

  template <int kCount>
  [[gnu::always_inline]] static inline void add_group(const char* sums, const float (&w)[3][kTile], const float* parts,
                                                      Floats (&sum)[kCount][kVectors]) {
    Floats scale[kVectors], shift[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) scale[j] = Vec::load(w[0] + 16 * j), shift[j] = Vec::load(w[1] + 16 * j);
#pragma GCC unroll 4
    for (int m = 0; m < kCount; ++m) {
      const Floats scale_x = Vec::all(parts[m]);
      const __m512i added = _mm512_castps_si512(Vec::all(parts[kRows + m]));
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        const __m512i integers = _mm512_add_epi32(_mm512_load_si512(sums + j * kTileBytes + m * 64), added);
        sum[m][j] = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_castsi512_ps(integers), scale[j], shift[j]), scale_x, sum[m][j]);
      }
    }
    if constexpr (!kMinimum) return;
#pragma GCC unroll 4
    for (int m = 0; m < kCount; ++m) {
      const Floats x = Vec::all(parts[2 * kRows + m]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[m][j] = _mm512_fmadd_ps(Vec::load(w[2] + 16 * j), x, sum[m][j]);
    }
  }
};

template <Format kFormat, int M, int kSets>
void few_sets(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride, int32_t token_begin,
              int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  FewKernel<kFormat, M, kSets> kernel;
  kernel.tokens = token_end - token_begin;
  kernel.x_stride = x_stride;
  kernel.row_stride = row_bytes(Dtype::kInt8, x_stride);
  thread_local Scratch scratch;
  char* memory = scratch.take(static_cast<size_t>(kernel.bytes_of(linear.inputs / kGroup)));
  kernel.prepare_x(memory, static_cast<const char*>(x) + token_begin * kernel.row_stride, linear.inputs);
  configure(M, kGroup);
  kernel.begin();
  drive_quantized(kernel, kernel.tokens, linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin, tile_end);
  kernel.finish();
  release();
}

// The instance for a number of tokens known only now, more than kFewTokens, at most kFewSets * 16: kSets, then M, are sought downwards.
template <Format kFormat, int kSets = kFewSets, int M = kRows>
void linear_quant_few(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                      int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  const int32_t tokens = token_end - token_begin;
  if constexpr (kSets > 1) {
    if (tokens <= (kSets - 1) * kRows) {
      return linear_quant_few<kFormat, kSets - 1, M>(linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin,
                                                     tile_end);
    }
  }
  // Of more sets, every other M: that is code enough.
  constexpr int kStep = kSets == 1 ? 1 : 2, kLeast = kSets == 1 ? kFewTokens<kFormat> + 1 : (kSets - 1) * kRows / kSets + 1;
  if constexpr (M - kStep >= kLeast) {
    if (tokens <= kSets * (M - kStep)) {
      return linear_quant_few<kFormat, kSets, M - kStep>(linear, x, x_stride, y, y_stride, token_begin, token_end,
                                                         tile_begin, tile_end);
    }
  }
  few_sets<kFormat, M, kSets>(linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin, tile_end);
}

}  // namespace amx
}  // namespace linear_detail
}  // namespace
}  // namespace serried
