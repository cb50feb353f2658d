// One group of 32 k of quantized weights (int8, int4, int4 with minimum) for M tokens and V vectors of outputs.
//
// The order of float operations, for each output and group of 32 k in ascending order (fma where the set has it):
//   sum = fma(float(exact integer sum) * scale_w, scale_x, sum)
//   sum = fma(minimum_w, scale_x * float(sum of x), sum)        int4 with minimum only
// The values of weights are unsigned; 128 (int4: 8) times the sum of x is what the integer sum begins with, negative.
// In a group that is fine for a token, the sum is 8 times that of its high parts and that of its low parts: an integer
// still, below 2^22, so that nothing else changes.
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
  const char *begin = nullptr, *end = nullptr;

  // For the 256 bytes at `at`, part `part` of `parts`.
  [[gnu::always_inline]] void step(const char* at, int part = 0, int parts = 1) const {
    const int first = part * 4 / parts, last = (part + 1) * 4 / parts;  // lines, here or of pages
#if SERRIED_amx
    // To L2, four pages side by side: see linear_amx.hpp.
    constexpr int64_t kLead = 16384, kPage = 4096, kBlock = 4 * kPage;
    const int64_t line = (at - begin) / kStepBytes, block = line / 64;
    const char* from = begin + kLead + block * kBlock + line % 64 * 64;
    if (from >= end) return;
    for (int page = first; page < last; ++page) _mm_prefetch(from + page * kPage, _MM_HINT_T1);
#else
    for (int line = first; line < last; ++line) prefetch_line(at + kPrefetchBytes + line * 64);
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

// scales: of a token's x, of the group; its sums lie behind them.
template <Format kFormat, int M, int V>
struct QuantGroup {
  static constexpr int64_t kInputBytes = input_bytes(kFormat);
  static constexpr int64_t kGroupBytes = kInputBytes * kGroup;
  static constexpr bool kMinimum = kFormat == Format::kInt4Min;
  static constexpr int kOffset = kFormat == Format::kInt8 ? 128 : kFormat == Format::kInt4 ? 8 : 0;
  static constexpr bool kWords = kTakesWords<kFormat>;
  using Sums = GroupSums<kFormat, M, V>;
  static constexpr int64_t kValueBytes = int64_t{Sums::kSteps} * kStepBytes;

  int64_t x_stride, row_stride;  // columns; bytes
  int64_t y_stride;              // floats between two tokens of one node
  Ahead ahead;

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

// rows: tokens in a block.
template <class Kernel>
void drive_quantized(Kernel& kernel, int32_t rows, const Linear& linear, const void* x, int64_t x_stride, float* y,
                     int64_t y_stride, int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  kernel.x_stride = x_stride;
  kernel.row_stride = row_bytes(Dtype::kInt8, x_stride);
  kernel.y_stride = y_stride * linear.nodes;
  const auto* weight = static_cast<const char*>(linear.weight);
  kernel.ahead = {weight + Kernel::kInputBytes * linear.inputs * tile_begin,
                  weight + Kernel::kInputBytes * linear.inputs * tile_end};
  drive(kernel, linear, x, kernel.row_stride, y, y_stride, token_begin, token_end, rows, tile_begin, tile_end);
}

}  // namespace linear_detail
}  // namespace
}  // namespace serried
