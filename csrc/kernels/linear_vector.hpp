// Linears by vector multiply-adds: baseline, AVX2, AVX-512, and AVX-512 with BF16; float32 under every set.
//
// A block of M tokens times V vectors of outputs is held in registers while k ascends. Where 64 outputs do not fit
// beside M tokens, a short stretch of inputs (kStage) is walked once for each group of V vectors, and the sums wait in
// the top slot of the stack meanwhile.
#pragma once
#include <cstring>

#include "linear_drive.hpp"
#include "linear_lanes.hpp"
#include "quant_dots.hpp"

namespace serried {
namespace {
namespace linear_detail {

inline float bf16_value(uint16_t bits) { return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16); }

// ---- One step (256 bytes of weights): M tokens, V vectors. Operand: what a token's x is read as. ----

struct Float32 {
  using Operand = float;
  static constexpr int kElement = 4;
  static constexpr int kInputs = 1;  // in a step
  static constexpr bool kConverts = false;
  static constexpr int kMost = kWide || Vec::kWidth == 8 ? 6 : 2;  // tokens
  // Vectors of outputs for M tokens.
  static constexpr int vectors(int m) {
    if (kWide) return kVectors;
    return m == 1 ? 8 : m == 2 ? 4 : 2;
  }

  template <int M, int V>
  [[gnu::always_inline]] static inline void step(const char* weight, const float* x, int64_t stride,
                                                 Floats (&sum)[M][V]) {
    Floats w[V];
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) w[j] = Vec::load(reinterpret_cast<const float*>(weight) + j * Vec::kWidth);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Floats v = Vec::all(x[m * stride]);
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) sum[m][j] = Vec::multiply_add(sum[m][j], w[j], v);
    }
  }
};

// Without instructions for bf16: x is widened to float32 first, weights as they are read.
struct WidenedBf16 {
  using Operand = float;
  static constexpr int kElement = 2;
  static constexpr int kInputs = 2;
  static constexpr bool kConverts = true;
  static constexpr int kMost = kWide ? 12 : Vec::kWidth == 8 ? 6 : 2;
  static constexpr int vectors(int m) {
    if (kWide) return m <= 6 ? 4 : 2;  // 12 x 32 outputs: widening takes 8 % of the multiplications, 6 x 64: 16 %
    return m == 1 ? 8 : m == 2 ? 4 : 2;
  }

  template <int M, int V>
  [[gnu::always_inline]] static inline void step(const char* weight, const float* x, int64_t stride,
                                                 Floats (&sum)[M][V]) {
    Vec::Words w[V];
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) w[j] = Vec::words(weight + j * Vec::kWidth * 4);
    Floats half[V];
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) half[j] = Vec::even(w[j]);
    add_half<M, V>(half, x, stride, sum);
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) half[j] = Vec::odd(w[j]);
    add_half<M, V>(half, x + 1, stride, sum);
  }
  template <int M, int V>
  [[gnu::always_inline]] static inline void add_half(const Floats (&half)[V], const float* x, int64_t stride,
                                                     Floats (&sum)[M][V]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Floats v = Vec::all(x[m * stride]);
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) sum[m][j] = Vec::multiply_add(sum[m][j], half[j], v);
    }
  }
};

#if SERRIED_avx512_bf16
struct DotBf16 {
  using Operand = uint16_t;
  static constexpr int kElement = 2;
  static constexpr int kInputs = 2;
  static constexpr bool kConverts = false;
  static constexpr int kMost = 6;
  static constexpr int vectors(int) { return kVectors; }

  template <int M, int V>
  [[gnu::always_inline]] static inline void step(const char* weight, const uint16_t* x, int64_t stride,
                                                 Floats (&sum)[M][V]) {
    __m512bh w[V];
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) w[j] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weight + 64 * j));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, x + m * stride, 4);
      const __m512bh v = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) sum[m][j] = _mm512_dpbf16_ps(sum[m][j], w[j], v);
    }
  }
};
using Bf16 = DotBf16;
#else
using Bf16 = WidenedBf16;
#endif

// ---- A block of tokens ----

template <class Step, int M>
struct BlockKernel {
  static constexpr int kElement = Step::kElement;
  static constexpr int64_t kInputBytes = int64_t{kTile} * kElement;
  static constexpr int32_t kBatch = 4;
  static constexpr int32_t kGroupInputs = 4096 / kElement;  // 256 KB of weights: they stay in L2 for the batch
  static constexpr bool kOneLeaf = false;
  static constexpr int V = Step::vectors(M);
  static constexpr int kParts = kVectors / V;
  static constexpr bool kStraight = kParts == 1;
  // Inputs staged at once: x as the step wants it, and, where outputs go in parts, weights that stay in L1 between;
  // these are prefetched a stage ahead, so stages are short where memory sets the pace.
  static constexpr int32_t kStage = kStraight ? 512 : (M <= 4 ? 64 : 256) / kElement;
  using Operand = typename Step::Operand;

  int64_t x_stride;  // elements
  int64_t y_stride;  // floats between two tokens of one node
  alignas(64) float stack[kBatch][kStackDepth][M][kTile];
  alignas(64) float staged[Step::kConverts ? M * kStage : 1];

  float* slot(int32_t block, int32_t depth) { return stack[block][depth][0]; }

  void run(const Segment& s) {
    if constexpr (kStraight && !Step::kConverts) {
      const auto* x = reinterpret_cast<const Operand*>(s.x);
      part(s, 0, s.weight, x, x_stride, s.inputs, !s.resumes, true);
      return;
    }
    for (int32_t k = 0; k < s.inputs; k += kStage) stage(s, k, std::min(kStage, s.inputs - k));
  }

  void stage(const Segment& s, int32_t k, int32_t inputs) {
    const char* weight = s.weight + int64_t{k} * kTile * kElement;
    const Operand* x;
    int64_t stride;
    if constexpr (Step::kConverts) {
      widen(s.x + k * kElement, inputs);
      x = staged;
      stride = kStage;
    } else {
      x = reinterpret_cast<const Operand*>(s.x) + k;
      stride = x_stride;
    }
    const bool first = k == 0 && !s.resumes, last = k + inputs == s.inputs;
    for (int i = 0; i < kParts; ++i) part(s, i, weight, x, stride, inputs, first, last);
  }

  void widen(const char* x, int32_t inputs) {
    for (int m = 0; m < M; ++m) {
      const auto* from = reinterpret_cast<const uint16_t*>(x) + m * x_stride;
      float* to = staged + m * kStage;
      for (int32_t k = 0; k < inputs; ++k) to[k] = bf16_value(from[k]);
    }
  }

  // V vectors of outputs from vector `index` * V on.
  [[gnu::always_inline]] inline void part(const Segment& s, int index, const char* weight, const Operand* x,
                                          int64_t stride, int32_t inputs, bool first, bool last) {
    const int column = index * V * Vec::kWidth;
    Floats sum[M][V];
    begin_sums<M, V>(s, column, first, sum);
    const int32_t steps = inputs / Step::kInputs;
    // In parts, the lines to prefetch (those of the next stage) are shared out evenly among all steps of all parts.
    const char* ahead = kStraight ? weight + kPrefetchBytes
                                  : weight + (int64_t{steps} + int64_t{steps} / kParts * index) * kStepBytes;
    constexpr int kAhead = kStepBytes / kParts;
    weight += column * 4;
#pragma GCC unroll 2
    for (int32_t i = 0; i < steps; ++i) {
      for (int line = 0; line < kAhead; line += 64) prefetch_line(ahead + line);
      Step::template step<M, V>(weight, x, stride, sum);
      weight += kStepBytes;
      ahead += kAhead;
      x += Step::kInputs;
    }
    end_sums<M, V>(s, column, last, y_stride, sum);
  }
};

template <class Step, int M>
void linear_rows(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                 int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  BlockKernel<Step, M> kernel;
  kernel.x_stride = x_stride;
  kernel.y_stride = y_stride * linear.nodes;
  drive(kernel, linear, x, x_stride * Step::kElement, y, y_stride, token_begin, token_end, M, tile_begin, tile_end);
}

// Finds the instance for a number of tokens known only now.
template <class Step, int M = Step::kMost>
void linear_vector(int32_t rows, const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                   int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  if constexpr (M > 1) {
    if (rows < M) {
      return linear_vector<Step, M - 1>(rows, linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin,
                                        tile_end);
    }
  }
  linear_rows<Step, M>(linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin, tile_end);
}

template <class Step>
void linear_by_vectors(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                       int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  if (token_begin >= token_end || tile_begin >= tile_end) return;
  linear_vector<Step>(even_rows(token_end - token_begin, Step::kMost), linear, x, x_stride, y, y_stride, token_begin,
                      token_end, tile_begin, tile_end);
}

// ---- The limits that benchmarks compare with ----

// Loads of 32 bytes, even where 64 would do: Sapphire Rapids reads memory 10 to 15 % faster so.
inline uint64_t read_all(const char* data, size_t n) {
  typedef uint64_t Chunk __attribute__((vector_size(32)));
  constexpr int kLoads = kStepBytes / sizeof(Chunk);
  Chunk sum[kLoads] = {};
  for (size_t i = 0; i < n; i += kStepBytes) {
    for (int line = 0; line < kStepBytes; line += 64) prefetch_line(data + i + kPrefetchBytes + line);
#pragma GCC unroll 8
    for (int j = 0; j < kLoads; ++j) {
      Chunk chunk;
      std::memcpy(&chunk, data + i + j * sizeof(Chunk), sizeof chunk);
      sum[j] ^= chunk;
    }
  }
  uint64_t parts[sizeof sum / 8], result = 0;
  std::memcpy(parts, sum, sizeof sum);
  for (const uint64_t part : parts) result ^= part;
  return result;
}

// Keeps a value in a register, of unknown content to the compiler.
template <class V>
inline void hide(V& v) {
#if defined(__aarch64__)
  asm volatile("" : "+w"(v));
#elif SERRIED_LINEAR_512
  asm volatile("" : "+v"(v));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(v));
#else
  asm volatile("" : "+m"(v));
#endif
}

// sum = sum * factor + term, which stays near one, in as many sums as leave registers for the rest.
[[gnu::noinline]] double multiply_vectors(int64_t iterations) {
  constexpr int kSums = kWide ? 24 : 12;
  Floats sum[kSums], factor = Vec::all(0.5f), term = Vec::all(0.5f);
  hide(factor);
  hide(term);
  for (int i = 0; i < kSums; ++i) {
    sum[i] = Vec::all(1.0f + static_cast<float>(i));
    hide(sum[i]);
  }
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) {
      sum[i] = Vec::multiply_add(term, sum[i], factor);
    }
  }
  for (int i = 0; i < kSums; ++i) hide(sum[i]);
  return static_cast<double>(iterations) * kSums * Vec::kWidth * 2;
}

// Products of int8 with the unsigned values of int8 weights, as quant_dots.hpp adds them up.
[[gnu::noinline]] double multiply_integers(int64_t iterations) {
  constexpr int kSums = kWide ? 24 : 12;
  Ints sum[kSums] = {}, x = all(0x00010001);
  Bytes weights = Bytes{} + 1;
  hide(weights);
  for (int64_t n = 0; n < iterations; ++n) {
    hide(x);
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) {
#if SERRIED_VNNI
      sum[i] = add_products(sum[i], weights, x);
#else
      sum[i] += multiply_words((Words)weights, x);
#endif
      hide(sum[i]);
    }
  }
  return static_cast<double>(iterations) * kSums * kLanes * (SERRIED_VNNI ? 8 : 4);
}

#if SERRIED_avx512_bf16
[[gnu::noinline]] double multiply_pairs(int64_t iterations) {
  constexpr int kSums = 24;
  Floats sum[kSums], x = Vec::all(0.0f), weight = Vec::all(1.0f);
  hide(x);
  hide(weight);
  for (int i = 0; i < kSums; ++i) {
    sum[i] = Vec::all(1.0f);
    hide(sum[i]);
  }
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) {
      sum[i] = _mm512_dpbf16_ps(sum[i], reinterpret_cast<__m512bh>(weight), reinterpret_cast<__m512bh>(x));
    }
  }
  for (int i = 0; i < kSums; ++i) hide(sum[i]);
  return static_cast<double>(iterations) * kSums * Vec::kWidth * 4;
}
#endif

}  // namespace linear_detail
}  // namespace
}  // namespace serried
