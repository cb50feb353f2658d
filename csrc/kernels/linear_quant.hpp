// Linears with quantized weights, by vectors: int8, int4, int4 with minimum.
//
// The order of float operations, for each output and group of 32 k in ascending order (fma where the set has it):
//   sum = fma(float(exact integer sum) * scale_w, scale_x, sum)
//   sum = fma(minimum_w, scale_x * float(sum of x), sum)        int4 with minimum only
// The values of weights are unsigned; 128 (int4: 8) times the sum of x is what the integer sum begins with, negative.
// In a group that is fine for a token, the sum is 8 times that of its high parts and that of its low parts: an integer
// still, below 2^22, so that nothing else changes.
//
// As in linear_vector.hpp a block of M tokens times V vectors of outputs is held in registers, and where 64 outputs do
// not fit, a short stretch of groups is walked once for each V vectors.
#pragma once
#include "int8_row.hpp"
#include "kernels.hpp"
#include "linear_drive.hpp"
#include "linear_lanes.hpp"
#include "quant_dots.hpp"

namespace serried {
namespace {
namespace linear_detail {

// The prefetch beside a straight walk over a thread's weights.
struct Ahead {
#if SERRIED_amx
  static constexpr bool kFar = true;  // to L2
#else
  static constexpr bool kFar = false;
#endif
  const char *begin = nullptr, *end = nullptr;

  // For the 256 bytes at `at`.
  [[gnu::always_inline]] void step(const char* at) const {
#if SERRIED_amx
    // To L2, four pages side by side: see linear_amx.hpp.
    constexpr int64_t kLead = 16384, kPage = 4096, kBlock = 4 * kPage;
    const int64_t line = (at - begin) / kStepBytes, block = line / 64;
    const char* from = begin + kLead + block * kBlock + line % 64 * 64;
    if (from >= end) return;
    for (int page = 0; page < 4; ++page) _mm_prefetch(from + page * kPage, _MM_HINT_T1);
#else
    for (int line = 0; line < kStepBytes; line += 64) prefetch_line(at + kPrefetchBytes + line);
#endif
  }
  // For the scales at the end of a group of `bytes`, of which `steps` have been seen to.
  [[gnu::always_inline]] void rest(const char* group, int64_t bytes, int steps) const {
#if SERRIED_amx
    if ((group - begin + bytes) / kStepBytes > (group - begin) / kStepBytes + steps) step(group + steps * kStepBytes);
#else
    for (int64_t at = steps * kStepBytes; at < bytes; at += 64) prefetch_line(group + kPrefetchBytes + at);
#endif
  }
};

// x as pairs of words, for the sets that multiply those: of each four k the first and third, then the second and last.
template <int M, int32_t kGroups>
struct PairsOfX {
  static constexpr int64_t kGroupBytes = 2 * kGroup, kStride = kGroups * kGroupBytes;
  alignas(64) int16_t pairs[M][kGroups * kGroup];

  void read(const char* x, int64_t stride, int32_t groups) {
    for (int m = 0; m < M; ++m) {
      const auto* from = reinterpret_cast<const int8_t*>(x + m * stride);
      for (int32_t k = 0; k < groups * kGroup; k += 4) {
        int16_t* to = pairs[m] + k;
        to[0] = from[k], to[1] = from[k + 2], to[2] = from[k + 1], to[3] = from[k + 3];
      }
    }
  }
  const char* data() const { return reinterpret_cast<const char*>(pairs); }
};

template <Format kFormat, int M>
struct QuantKernel {
  static constexpr int kElement = 1;
  static constexpr int64_t kInputBytes = input_bytes(kFormat);
  static constexpr int64_t kGroupBytes = kInputBytes * kGroup;
  static constexpr int32_t kBatch = 4;
  static constexpr int32_t kGroupInputs = 512;  // 18 to 34 KB of weights: they stay in L1 for the batch
  static constexpr bool kOneLeaf = false;
  static constexpr bool kMinimum = kFormat == Format::kInt4Min;
  static constexpr int kOffset = kFormat == Format::kInt8 ? 128 : kFormat == Format::kInt4 ? 8 : 0;
  static constexpr bool kWords = kTakesWords<kFormat>;
  // Vectors of outputs beside M tokens: integer sums, and weights, should fit the registers.
  static constexpr int V = kWide ? 4 : kLanes == 8 ? (M == 1 ? 8 : M == 2 ? 4 : 2) : (M == 1 ? 8 : 4);
  static constexpr int kParts = kVectors / V;
  static constexpr bool kStraight = kParts == 1;
  // Groups at once where outputs go in parts, or x is converted; see BlockKernel.
  static constexpr int32_t kStage = kStraight && !kWords ? 1 << 20 : 4;
  using Sums = GroupSums<kFormat, M, V>;
  static constexpr int64_t kValueBytes = int64_t{Sums::kSteps} * kStepBytes;

  int64_t x_stride, row_stride;  // columns; bytes
  int64_t y_stride;              // floats between two tokens of one node
  Ahead ahead;
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
      begin_group(scales, integers);
      Sums::add(group + column * 4, x, stride, integers, [&](int f) __attribute__((always_inline)) {
        prefetch(group, next, index, f);
      });
      if (index == kParts - 1) ahead.rest(group, kGroupBytes, Sums::kSteps);
      refine(group + column * 4, scales, fine + i, low + i * kGroup, integers);
      end_group(group + kValueBytes + column * 2, scales, integers, sum);
      group += kGroupBytes;
      next += kGroupBytes / kParts;
      x += kWords ? 2 * kGroup : kGroup;
      scales += 4;
    }
    end_sums<M, V>(s, column, last, y_stride, sum);
  }

  // Beside step f of a group. Where outputs go in parts, they share the lines, of the next stage if those go to L1.
  [[gnu::always_inline]] inline void prefetch(const char* group, const char* next, int index, int f) const {
    if constexpr (kStraight || Ahead::kFar) {
      if (f % kParts == index) ahead.step(group + f * kStepBytes);
      return;
    }
    for (int line = 0; line < kStepBytes / kParts; line += 64) prefetch_line(next + f * kStepBytes / kParts + line);
  }

  int32_t sum_of_x(const char* scales, int m) const {
    int32_t sum;
    std::memcpy(&sum, scales + x_stride / kGroup * 4 + m * row_stride, 4);
    return sum;
  }
  float scale_of_x(const char* scales, int m) const {
    float scale;
    std::memcpy(&scale, scales + m * row_stride, 4);
    return scale;
  }

  [[gnu::always_inline]] inline void begin_group(const char* scales, Ints (&integers)[M][V]) const {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Ints begin = kOffset ? all(-kOffset * sum_of_x(scales, m)) : Ints{};
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) integers[m][j] = begin;
    }
  }

  // The sums of tokens for which the group is fine.
  [[gnu::always_inline]] inline void refine(const char* weight, const char* scales, const uint8_t* fine, const char* low,
                                            Ints (&integers)[M][V]) const {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      if (__builtin_expect(fine[m * row_stride] == 0, 1)) continue;
      Ints own[1][V];  // not `integers`, which would have to lie in memory for the call
      const Ints begin = all(kOffset * sum_of_x(scales, m) * (kFineSteps - 1));
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) own[0][j] = integers[m][j] * kFineSteps + begin;
      add_low(weight, low + m * row_stride, own);
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) integers[m][j] = own[0][j];
    }
  }

  [[gnu::noinline]] static void add_low(const char* weight, const char* low, Ints (&sum)[1][V]) {
    const auto nothing = [](int) {};
    if constexpr (kWords) {
      PairsOfX<1, 1> one;
      one.read(low, 0, 1);
      GroupSums<kFormat, 1, V>::add(weight, one.data(), 0, sum, nothing);
    } else {
      GroupSums<kFormat, 1, V>::add(weight, low, 0, sum, nothing);
    }
  }

  // weight: the float16 scales (and, 64 further, minimums) of the outputs.
  [[gnu::always_inline]] inline void end_group(const char* weight, const char* scales, const Ints (&integers)[M][V],
                                               Floats (&sum)[M][V]) const {
    Floats scale[V];
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) scale[j] = load_halves(weight + j * kLanes * 2);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Floats scale_x = Vec::all(scale_of_x(scales, m));
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j)
        sum[m][j] = Vec::multiply_add(sum[m][j], multiply(to_floats(integers[m][j]), scale[j]), scale_x);
    }
    if constexpr (!kMinimum) return;
    Floats minimum[V];
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) minimum[j] = load_halves(weight + 2 * kTile + j * kLanes * 2);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Floats x = Vec::all(scale_of_x(scales, m) * static_cast<float>(sum_of_x(scales, m)));
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) sum[m][j] = Vec::multiply_add(sum[m][j], minimum[j], x);
    }
  }
};

template <Format kFormat, int M>
void quant_rows(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride, int32_t token_begin,
                int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  using Kernel = QuantKernel<kFormat, M>;
  Kernel kernel;
  kernel.x_stride = x_stride;
  kernel.row_stride = row_bytes(Dtype::kInt8, x_stride);
  kernel.y_stride = y_stride * linear.nodes;
  const auto* weight = static_cast<const char*>(linear.weight);
  kernel.ahead = {weight + Kernel::kInputBytes * linear.inputs * tile_begin,
                  weight + Kernel::kInputBytes * linear.inputs * tile_end};
  drive(kernel, linear, x, kernel.row_stride, y, y_stride, token_begin, token_end, M, tile_begin, tile_end);
}

constexpr int kQuantMost = kWide ? 6 : 4;  // tokens in a block

// Finds the instance for a number of tokens known only now.
template <Format kFormat, int M = kQuantMost>
void quant_vector(int32_t rows, const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                  int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  if constexpr (M > 1) {
    if (rows < M) {
      return quant_vector<kFormat, M - 1>(rows, linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin,
                                          tile_end);
    }
  }
  quant_rows<kFormat, M>(linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin, tile_end);
}

template <Format kFormat>
void quant_by_vectors(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                      int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  if (token_begin >= token_end || tile_begin >= tile_end) return;
  quant_vector<kFormat>(even_rows(token_end - token_begin, kQuantMost), linear, x, x_stride, y, y_stride, token_begin,
                        token_end, tile_begin, tile_end);
}

}  // namespace linear_detail
}  // namespace
}  // namespace serried
