// bf16 linears by AMX. A step is 32 k: one tile of x (up to 16 tokens) times four tiles of weights (16 outputs each)
// into four accumulators, tmm0 to tmm3. The weights' layout is what tdpbf16ps wants: 16 pairs of k, 256 bytes apart.
//
// The multiplier should not wait for the memory behind it. An accumulator is stored just before the next segment zeroes
// it (storing all four at once costs 20 % with leaves of 128). A leaf is folded during the steps of the segment after
// that, once its sums have left the store buffer (a segment sooner costs 10 %), which is why a group is one leaf.
// Tried, and slower: copying x into tiles in the same manner (stores among tile loads are dear); prefetching the next
// group's weights into L1 (they are in L2; only the next tile's are fetched, to L2).
#pragma once
#include <immintrin.h>

#include "linear_drive.hpp"

namespace serried {
namespace {
namespace linear_detail {
namespace amx {

// Assembly rather than intrinsics: GCC 12's tile loads do not tell the compiler that they read memory.
template <int kReg>
inline void load(const void* data, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(data), "r"(stride), "i"(kReg) : "memory");
}
template <int kReg>
inline void store(void* data, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(data), "r"(stride), "i"(kReg) : "memory");
}
template <int kReg>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kReg));
}
template <int kSum, int kX, int kWeight>
inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kX), "i"(kWeight));
}

// `rows` tokens in x and in the sums, full tiles of weights.
inline void configure(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int reg = 0; reg < 8; ++reg) {
    config.bytes[reg] = 64;
    config.rows[reg] = static_cast<uint8_t>(reg < 5 ? rows : 16);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}
inline void release() { asm volatile("tilerelease" ::: "memory"); }

constexpr int kRows = 16;
constexpr int kStepInputs = 32;
constexpr int kSlotFloats = kRows * kTile;

// The adding up of a stored sum, row by row. out = null: nothing to do.
struct Fold {
  const float* top = nullptr;
  int32_t pops = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
  const float* bias = nullptr;

  void row(int32_t m) const {
    const float* from = top + m * kTile;
    __m512 sum[4];
    for (int j = 0; j < 4; ++j) sum[j] = _mm512_loadu_ps(from + 16 * j);
    for (int32_t p = 1; p <= pops; ++p) {
      const float* below = from - p * kSlotFloats;
      for (int j = 0; j < 4; ++j) sum[j] = _mm512_add_ps(_mm512_load_ps(below + 16 * j), sum[j]);
    }
    if (bias) {
      for (int j = 0; j < 4; ++j) sum[j] = _mm512_add_ps(sum[j], _mm512_loadu_ps(bias + 16 * j));
    }
    for (int j = 0; j < 4; ++j) _mm512_storeu_ps(out + m * out_stride + 16 * j, sum[j]);
  }
};

struct Kernel {
  static constexpr int kElement = 2;
  static constexpr int32_t kBatch = 4;
  static constexpr int32_t kGroup = 256;  // 32 KB of weights: they stay in L1 for the batch
  static constexpr bool kOneLeaf = true;

  int64_t x_stride, y_stride;  // bytes; floats between two tokens of one node
  int32_t rows;
  float* pending = nullptr;  // where tmm0 to tmm3 belong, as the last segment left them
  int64_t pending_stride = 0;  // bytes
  int32_t pending_stack = 0;
  Fold fold, waiting, folding;  // of the pending sums; of those before, which were stored; what is being done
  int32_t folded = 0;           // rows of the latter
  alignas(64) float stack[kBatch][kStackDepth][kSlotFloats];

  float* slot(int32_t block, int32_t depth) { return stack[block][depth]; }

  void fold_rows(int32_t count) {
    if (!folding.out) return;
    for (const int32_t end = std::min(rows, folded + count); folded < end; ++folded) folding.row(folded);
  }
  template <int kReg>
  void store_pending() {
    store<kReg>(pending + 16 * kReg, pending_stride);
  }
  void flush() {
    store_pending<0>();
    store_pending<1>();
    store_pending<2>();
    store_pending<3>();
    begin_fold(waiting);
    fold_rows(rows);
    begin_fold(fold);
    fold_rows(rows);
  }
  void begin_fold(const Fold& what) {
    folding = what;
    folded = 0;
  }

  void run(const Segment& s) {
    if (s.blocks == 1) return run_lines<16, _MM_HINT_T1>(s, s.weight + kPrefetchBytes);
    const int32_t lines = s.blocks >= 16 ? 4 : s.blocks >= 8 ? 8 : s.blocks >= 4 ? 16 : 32;  // in a step
    const char* ahead = s.next_tile + s.block * lines * 64;
    if (s.block * lines >= 64) return run_lines<0, _MM_HINT_T1>(s, ahead);
    switch (lines) {
      case 4: return run_lines<1, _MM_HINT_T1>(s, ahead);
      case 8: return run_lines<2, _MM_HINT_T1>(s, ahead);
      case 16: return run_lines<4, _MM_HINT_T1>(s, ahead);
      default: return run_lines<8, _MM_HINT_T1>(s, ahead);
    }
  }

  // kLines: cache lines to prefetch beside each multiplication. A step's weights are 64 lines: one block alone fetches
  // all of them, just ahead of itself (to L2: faster than to L1); the blocks of a chunk share those of the next tile.
  template <int kLines, _mm_hint kHint>
  void run_lines(const Segment& s, const char* ahead) {
    const char *x = s.x, *w = s.weight;
    const int32_t steps = s.inputs / kStepInputs;
    first_step<kLines, kHint>(x, w, ahead, s.resumes ? s.slot : nullptr);
    if (s.stack == pending_stack) {  // the sums of this segment may go where those folds read: no waiting
      begin_fold(waiting);
      fold_rows(rows);
      begin_fold(fold);
      waiting = Fold{};
    } else {
      begin_fold(waiting);
      waiting = fold;
    }
    plan(s);
    const int32_t share = steps > 4 ? 1 : steps > 2 ? 2 : 4;
    for (int32_t i = 1; i < steps; ++i) {
      x += kStepInputs * kElement;
      w += 16 * kStepBytes;
      ahead += 16 * kStepBytes;
      step<kLines, kHint>(x, w, ahead, share);
    }
    fold_rows(rows);
  }

  // What to do with the sums of this segment once it is over.
  void plan(const Segment& s) {
    const bool direct = s.ends_node && s.pops == 0 && !s.bias;
    pending_stack = s.stack;
    pending = direct ? s.y : s.slot;
    pending_stride = (direct ? y_stride : int64_t{kTile}) * 4;
    fold = Fold{};
    if (direct || !s.ends_leaf || (s.pops == 0 && !s.ends_node)) return;
    fold.top = s.slot;
    fold.pops = s.pops;
    fold.out = s.ends_node ? s.y : s.slot - s.pops * kSlotFloats;
    fold.out_stride = s.ends_node ? y_stride : int64_t{kTile};
    fold.bias = s.ends_node ? s.bias : nullptr;
  }

  // Always inlined: see prefetch_line.
  template <int kLines, _mm_hint kHint, int kPart>
  [[gnu::always_inline]] static inline void prefetch(const char* ahead) {
    for (int i = 0; i < kLines; ++i) _mm_prefetch(ahead + (kPart * kLines + i) * 64, kHint);
  }
  template <int kSum>
  void begin_sum(const float* from) {
    store_pending<kSum>();
    if (from) {
      load<kSum>(from + 16 * kSum, kTile * 4);
    } else {
      zero<kSum>();
    }
  }

  template <int kLines, _mm_hint kHint>
  void first_step(const char* x, const char* w, const char* ahead, const float* from) {
    load<4>(x, x_stride);
    load<5>(w, kStepBytes);
    begin_sum<0>(from);
    multiply_add<0, 4, 5>();
    prefetch<kLines, kHint, 0>(ahead);
    load<6>(w + 64, kStepBytes);
    begin_sum<1>(from);
    multiply_add<1, 4, 6>();
    prefetch<kLines, kHint, 1>(ahead);
    load<7>(w + 128, kStepBytes);
    begin_sum<2>(from);
    multiply_add<2, 4, 7>();
    prefetch<kLines, kHint, 2>(ahead);
    load<5>(w + 192, kStepBytes);
    begin_sum<3>(from);
    multiply_add<3, 4, 5>();
    prefetch<kLines, kHint, 3>(ahead);
  }

  template <int kLines, _mm_hint kHint>
  void step(const char* x, const char* w, const char* ahead, int32_t share) {
    load<4>(x, x_stride);
    load<5>(w, kStepBytes);
    multiply_add<0, 4, 5>();
    prefetch<kLines, kHint, 0>(ahead);
    fold_rows(share);
    load<6>(w + 64, kStepBytes);
    multiply_add<1, 4, 6>();
    prefetch<kLines, kHint, 1>(ahead);
    fold_rows(share);
    load<7>(w + 128, kStepBytes);
    multiply_add<2, 4, 7>();
    prefetch<kLines, kHint, 2>(ahead);
    fold_rows(share);
    load<5>(w + 192, kStepBytes);
    multiply_add<3, 4, 5>();
    prefetch<kLines, kHint, 3>(ahead);
    fold_rows(share);
  }
};

inline void linear(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                   int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  if (token_begin >= token_end || tile_begin >= tile_end) return;
  Kernel kernel;
  kernel.x_stride = x_stride * Kernel::kElement;
  kernel.y_stride = y_stride * linear.nodes;
  kernel.rows = even_rows(token_end - token_begin, kRows);
  kernel.pending = kernel.slot(0, 0);  // the first segment stores nothing of worth where nothing is yet
  kernel.pending_stride = kTile * 4;
  configure(kernel.rows);
  drive(kernel, linear, x, x_stride, y, y_stride, token_begin, token_end, kernel.rows, tile_begin, tile_end);
  kernel.flush();
  release();
}

inline double multiply(int64_t iterations) {
  configure(kRows);
  for (int64_t i = 0; i < iterations; ++i) {
    multiply_add<0, 4, 5>();
    multiply_add<1, 4, 6>();
    multiply_add<2, 4, 7>();
    multiply_add<3, 4, 5>();
  }
  release();
  return static_cast<double>(iterations) * 4 * 2 * kRows * 16 * kStepInputs;
}

}  // namespace amx
}  // namespace linear_detail
}  // namespace
}  // namespace serried
