// Linears with quantized weights by vectors, where registers hold the integer sums of 64 outputs for a set of up to 6
// tokens. Up to four sets go through each group of 32 k side by side, and their float sums lie in the L1 cache: weights
// come from memory at one even pace while all sets are multiplied. (Set after set, with a stretch of weights kept in L1
// for all, adds the time of the later sets to the memory's: 8 tokens took 28 ms instead of 25, of which reading is 21.)
#pragma once
#include "quant_group.hpp"

namespace serried {
namespace {
namespace linear_detail {

constexpr int kSetTokens = kWide ? 6 : 4;
// On AMX more tokens go by tiles (see quant_amx_few.hpp), which are no faster for int8 while the memory is the limit.
template <Format kFormat>
constexpr int kMostSets =
#if SERRIED_amx
    kFormat == Format::kInt8 ? 2 : 1;
#else
    4;
#endif
template <Format kFormat>
constexpr int32_t kFewTokens = kMostSets<kFormat> * kSetTokens;
template <Format kFormat>
constexpr bool kInSets = kWide && !kTakesWords<kFormat>;

// Sets for a number of tokens: those that compute the fewest twice.
constexpr int sets_for(int tokens, int most) {
  int best = (tokens + kSetTokens - 1) / kSetTokens;
  const auto rows = [=](int sets) { return (tokens + sets - 1) / sets * sets; };
  for (int sets = best; sets <= most; ++sets)
    if (rows(sets) < rows(best)) best = sets;
  return best;
}

// A block of `tokens` tokens, at most kSets * M; the last set is moved back to end with it.
template <Format kFormat, int M, int kSets>
struct SetsKernel : QuantGroup<kFormat, M, kVectors> {
  using Group = QuantGroup<kFormat, M, kVectors>;
  using Sums = typename Group::Sums;
  using Group::ahead, Group::row_stride, Group::x_stride, Group::y_stride, Group::kGroupBytes;
  static constexpr int kElement = 1;
  static constexpr int32_t kBatch = kSets < 4 ? 4 / kSets : 1;
  static constexpr int32_t kGroupInputs = 512;  // 18 to 34 KB of weights: they stay in L1 for the batch
  static constexpr bool kOneLeaf = false;

  int32_t tokens;
  alignas(64) float stack[kBatch][kSets][kStackDepth][M][kTile];

  float* slot(int32_t block, int32_t depth) { return stack[block][0][depth][0]; }

  void run(const Segment& s) {
    const Int8Row row(s.x - s.k, x_stride);
    const int64_t at = s.k / kGroup;
    const auto* scales = reinterpret_cast<const char*>(row.scales + at);
    const auto* low = reinterpret_cast<const char*>(row.low + at * kGroup);
    const uint8_t* fine = row.fine + at;
    const char *x = s.x, *group = s.weight;
    Segment set[kSets];
    int64_t bytes[kSets];  // from the block's first token to the set's
    Floats sum[kSets][M][kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kSets; ++i) {
      const int32_t first = std::min(i * M, tokens - M);
      set[i] = s, bytes[i] = first * row_stride;
      set[i].slot += int64_t{i} * kStackDepth * M * kTile, set[i].y += first * y_stride;
      begin_sums<M, kVectors>(set[i], 0, !s.resumes, sum[i]);
    }
    for (int32_t k = 0; k < s.inputs; k += kGroup) {
#pragma GCC unroll 4
      for (int i = 0; i < kSets; ++i) {
        Ints integers[M][kVectors];
        this->begin_group(scales + bytes[i], integers);
        Sums::add(group, x + bytes[i], row_stride, integers,
                  [&](int f) __attribute__((always_inline)) { ahead.step(group + f * kStepBytes, i, kSets); });
        this->refine(group, scales + bytes[i], fine + bytes[i], low + bytes[i], integers);
        this->end_group(group + Group::kValueBytes, scales + bytes[i], integers, sum[i]);
      }
      ahead.rest(group, kGroupBytes, Sums::kSteps);
      group += kGroupBytes, x += kGroup, scales += sizeof(float), low += kGroup, ++fine;
    }
#pragma GCC unroll 4
    for (int i = 0; i < kSets; ++i) end_sums<M, kVectors>(set[i], 0, true, y_stride, sum[i]);
  }
};

// The instance for blocks of `tokens` tokens, a number known only now.
template <Format kFormat, int kTokens = kFewTokens<kFormat>>
void quant_sets(int32_t tokens, const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  if constexpr (kTokens > 1) {
    if (tokens < kTokens) {
      return quant_sets<kFormat, kTokens - 1>(tokens, linear, x, x_stride, y, y_stride, token_begin, token_end,
                                              tile_begin, tile_end);
    }
  }
  constexpr int kSets = sets_for(kTokens, kMostSets<kFormat>), M = (kTokens + kSets - 1) / kSets;
  SetsKernel<kFormat, M, kSets> kernel;
  kernel.tokens = tokens;
  drive_quantized(kernel, tokens, linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin, tile_end);
}

}  // namespace linear_detail
}  // namespace
}  // namespace serried
