// Linears with quantized weights, by vectors: int8, int4, int4 with minimum. What is computed: see quant_group.hpp.
//
// Where the registers hold 64 outputs beside a few tokens, see linear_quant_sets.hpp. Elsewhere, as in
// linear_vector.hpp, a block of M tokens times V vectors of outputs is held in registers, and where 64 outputs do not
// fit, a short stretch of groups is walked once for each V vectors.
#pragma once
#include "linear_quant_sets.hpp"
#include "quant_group.hpp"

namespace serried {
namespace {
namespace linear_detail {

// Vectors of outputs beside M tokens: integer sums, and weights, should fit the registers.
constexpr int quant_vectors(int m) {
  if (kWide) return 4;
  return kLanes == 8 ? (m == 1 ? 8 : m == 2 ? 4 : 2) : (m == 1 ? 8 : 4);
}

template <Format kFormat, int M>
struct QuantKernel : QuantGroup<kFormat, M, quant_vectors(M)> {
  static constexpr int V = quant_vectors(M);
  using Group = QuantGroup<kFormat, M, V>;
  using Sums = typename Group::Sums;
  using Group::ahead, Group::row_stride, Group::x_stride, Group::y_stride, Group::kGroupBytes,
      Group::kWords;
  static constexpr int kElement = 1;
  static constexpr int32_t kBatch = 4;
  static constexpr int32_t kGroupInputs = 512;  // 18 to 34 KB of weights: they stay in L1 for the batch
  static constexpr bool kOneLeaf = false;
  static constexpr int kParts = kVectors / V;
  static constexpr bool kStraight = kParts == 1;
  // Groups at once where outputs go in parts, or x is converted; see BlockKernel.
  static constexpr int32_t kStage = kStraight && !kWords ? 1 << 20 : 4;

  alignas(64) float stack[kBatch][kStackDepth][M][kTile];
  PairsOfX<M, kWords ? kStage : 1> pairs;

  float* slot(int32_t block, int32_t depth) { return stack[block][depth][0]; }

  void run(const Segment& s) {
    const int32_t groups = s.inputs / kGroup;
    for (int32_t g = 0; g < groups; g += kStage) stage(s, g, std::min(kStage, groups - g));
  }

 private:
  void stage(const Segment& s, int32_t g, int32_t count) {
    const bool first = g == 0 && !s.resumes, last = (g + count) * kGroup == s.inputs;
    const char* x = s.x + g * kGroup;
    if constexpr (kWords) pairs.read(x, row_stride, count);
    for (int i = 0; i < kParts; ++i) part(s, i, g, count, first, last);
  }

  // V vectors of outputs from vector `index` * V on, groups [g, g + count) of the segment.
  [[gnu::always_inline]] inline void part(const Segment& s, int index, int32_t g, int32_t count, bool first,
                                          bool last) {
    const int column = index * V * kLanes;
    const char* group = s.weight + g * kGroupBytes;
    const char* x = kWords ? pairs.data() : s.x + g * kGroup;
    const int64_t stride = kWords ? pairs.kStride : row_stride;
    const Int8Row row(s.x - s.k, x_stride);
    const int64_t at = s.k / kGroup + g;
    const auto* scales = reinterpret_cast<const char*>(row.scales + at);
    const uint8_t* fine = row.fine + at;
    const auto* low = reinterpret_cast<const char*>(row.low + at * kGroup);
    const char* next = group + count * (kGroupBytes + kGroupBytes / kParts * index);  // where outputs go in parts
    Floats sum[M][V];
    begin_sums<M, V>(s, column, first, sum);
    for (int32_t i = 0; i < count; ++i) {
      Ints integers[M][V];
      this->begin_group(scales, integers);
      Sums::add(group + column * 4, x, stride, integers, [&](int f) __attribute__((always_inline)) {
        prefetch(group, next, f);
      });
      if (index == kParts - 1) ahead.rest(group, kGroupBytes, Sums::kSteps);
      this->refine(group + column * 4, scales, fine + i, low + i * kGroup, integers);
      this->end_group(group + Group::kValueBytes + column * 2, scales, integers, sum);
      group += kGroupBytes;
      next += kGroupBytes / kParts;
      x += kWords ? 2 * kGroup : kGroup;
      scales += 4;
    }
    end_sums<M, V>(s, column, last, y_stride, sum);
  }

  // Beside step f of a group. Where outputs go in parts, they share the lines of the next stage.
  [[gnu::always_inline]] inline void prefetch(const char* group, const char* next, int f) const {
    if constexpr (kStraight) {
      return ahead.step(group + f * kStepBytes);
    }
    for (int line = 0; line < kStepBytes / kParts; line += 64) prefetch_line(next + f * kStepBytes / kParts + line);
  }
};

// Finds the instance for a number of tokens known only now.
template <Format kFormat, int M = kSetTokens>
void quant_vector(int32_t rows, const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                  int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  if constexpr (M > 1) {
    if (rows < M) {
      return quant_vector<kFormat, M - 1>(rows, linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin,
                                          tile_end);
    }
  }
  QuantKernel<kFormat, M> kernel;
  drive_quantized(kernel, M, linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin, tile_end);
}

template <Format kFormat>
void quant_by_vectors(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                      int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  if (token_begin >= token_end || tile_begin >= tile_end) return;
  const int32_t tokens = token_end - token_begin;
  if constexpr (kInSets<kFormat>) {
    quant_sets<kFormat>(tokens <= kFewTokens<kFormat> ? tokens : even_rows(tokens, kSetTokens), linear, x, x_stride,
                        y, y_stride, token_begin, token_end, tile_begin, tile_end);
  } else {
    quant_vector<kFormat>(even_rows(tokens, kSetTokens), linear, x, x_stride, y, y_stride, token_begin, token_end,
                          tile_begin, tile_end);
  }
}

}  // namespace linear_detail
}  // namespace
}  // namespace serried
