// A pass of bf16 linears by AMX: one leaf (or a group of its inputs) for a strip of tokens and half a tile of weights, with
// what it hides behind its multiplications: the fold of earlier sums, and the prefetch of later weights. linear_amx.hpp
// walks over the passes, and says why.
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "amx_tiles.hpp"
#include "linear_drive.hpp"

namespace serried {
namespace {
namespace linear_detail {
namespace amx {

constexpr int kStepInputs = 32;
constexpr int kStepWeights = kStepInputs * kTile * 2;  // bytes
constexpr int kXTile = kRows * kStepInputs * 2;        // bytes
constexpr int kSlotFloats = 4 * kRows * 16;            // the sums of a pass: [tokens][outputs]
constexpr int64_t kPages = 4;                          // what is prefetched side by side

struct Place {
  float* data = nullptr;
  int64_t stride = 0;  // floats between tokens
};

// The adding up of stored sums. to.data = null: nothing to do.
struct Fold {
  const float* top = nullptr;
  int32_t pops = 0;
  Place to;
  const float* bias = nullptr;
  bool stream = false;
};

struct Pass {
  const char *x, *weight;
  int32_t steps;
  const float* from;  // the sums so far, or null: from zero
  Place to;           // where they belong
  Fold fold;          // what to do with them then
};

// A fold in pieces of four vectors. It lives in registers for the length of a pass.
template <int kOuts>
struct Folding {
  static constexpr int kRowsAtOnce = 4 / kOuts;
  const float* top;
  float* to;
  int64_t stride;
  const float* bias;
  int32_t pops, left;  // left: rows
  bool stream;

  Folding(const Fold& fold, int32_t tokens)
      : top(fold.top), to(fold.to.data), stride(fold.to.stride), bias(fold.bias), pops(fold.pops),
        left(fold.to.data ? tokens : 0), stream(fold.stream) {}

  [[gnu::always_inline]] void piece() {
    if (left >= kRowsAtOnce) {
      rows<kRowsAtOnce>();
    } else if (left > 0) {
      rows<1>();
    }
  }
  void rest() {
    while (left > 0) piece();
  }

 private:
  template <int kCount>
  [[gnu::always_inline]] void rows() {
    __m512 sum[kCount * kOuts];
#pragma GCC unroll 4
    for (int j = 0; j < kCount * kOuts; ++j) sum[j] = _mm512_load_ps(top + 16 * j);
    for (int32_t p = 1; p <= pops; ++p) {
      const float* below = top - p * kSlotFloats;
#pragma GCC unroll 4
      for (int j = 0; j < kCount * kOuts; ++j) sum[j] = _mm512_add_ps(_mm512_load_ps(below + 16 * j), sum[j]);
    }
    if (bias) {
#pragma GCC unroll 4
      for (int j = 0; j < kCount * kOuts; ++j) sum[j] = _mm512_add_ps(sum[j], _mm512_loadu_ps(bias + j % kOuts * 16));
    }
#pragma GCC unroll 4
    for (int j = 0; j < kCount * kOuts; ++j) put(to + j / kOuts * stride + j % kOuts * 16, sum[j]);
    top += kCount * kOuts * 16;
    to += kCount * stride;
    left -= kCount;
  }
  [[gnu::always_inline]] void put(float* at, __m512 value) const {
    if (stream) {
      _mm512_stream_ps(at, value);
    } else {
      _mm512_storeu_ps(at, value);
    }
  }
};

// kBlocks: of 16 tokens.
template <int kBlocks>
struct Kernel {
  static constexpr int kOuts = 4 / kBlocks;       // tiles of weights in a pass
  static constexpr int kHalves = kBlocks;         // passes over 64 outputs
  static constexpr int kSlotStride = kOuts * 16;  // floats between tokens
  static constexpr int kStacks = kBlocks == 1 ? 1 : 4;
  static constexpr bool kLater = kStacks > 1;  // fold a pass later

  int64_t x_stride, x_block, x_step;  // bytes between tokens, to the second block, between steps
  int32_t tokens, second;  // of a strip; where its second block begins (they may overlap)
  const char *ahead_from, *ahead, *ahead_end;  // of the prefetch: its begin, where it stands, its end
  Place pending;        // where tmm0 to tmm3 belong, as the last pass left them
  Fold fold, waiting;   // of the pending sums; of those before, which were stored
  alignas(64) float stack[kStacks][kStackDepth][kSlotFloats];

  void run(const Pass& pass, int32_t lines) {
    if (ahead >= ahead_end) lines = 0;
    switch (lines) {
      case 0: return run_lines<0>(pass);
      case 1: return run_lines<1>(pass);
      case 2: return run_lines<2>(pass);
      case 4: return run_lines<4>(pass);
      case 8: return run_lines<8>(pass);
      default: return run_lines<16>(pass);
    }
  }
  void flush() {
    store_sum<0>(pending);
    store_sum<1>(pending);
    store_sum<2>(pending);
    store_sum<3>(pending);
    if (kLater) Folding<kOuts>(waiting, tokens).rest();
    Folding<kOuts>(fold, tokens).rest();
  }

 private:
  // kLines: cache lines to prefetch beside each multiplication, each in a page of its own.
  template <int kLines>
  void run_lines(const Pass& pass) {
    const char *x = pass.x, *w = pass.weight, *at = ahead;
    const int32_t steps = pass.steps;
    Folding<kOuts> folding(kLater ? waiting : fold, tokens);
    const Place to = pending;
    waiting = fold;
    fold = pass.fold;
    pending = pass.to;
    step<kLines>(
        x, w, at, [&](auto sum) __attribute__((always_inline)) { begin_sum<sum.value>(to, pass.from); },
        [&]() __attribute__((always_inline)) {
          if (kLater) folding.piece();
        });
    for (int32_t i = 1; i < steps; ++i) {
      at = next_lines<kLines>(at);
      x += x_step;
      w += kStepWeights;
      step<kLines>(
          x, w, at, [](auto) __attribute__((always_inline)) {},
          [&]() __attribute__((always_inline)) { folding.piece(); });
    }
    ahead = next_lines<kLines>(at);
    folding.rest();
  }

  template <int kSum>
  [[gnu::always_inline]] void store_sum(const Place& to) const {
    store<kSum>(to.data + kSum / kOuts * second * to.stride + kSum % kOuts * 16, to.stride * 4);
  }
  template <int kSum>
  [[gnu::always_inline]] void begin_sum(const Place& to, const float* from) const {
    store_sum<kSum>(to);
    if (from) {
      load<kSum>(from + kSum / kOuts * second * kSlotStride + kSum % kOuts * 16, kSlotStride * 4);
    } else {
      zero<kSum>();
    }
  }
  // Always inlined: see prefetch_line.
  template <int kLines>
  [[gnu::always_inline]] static inline void prefetch(const char* at) {
#pragma GCC unroll 16
    for (int i = 0; i < kLines; ++i) _mm_prefetch(at + i * 64, _MM_HINT_T1);
  }
  template <int kLines>
  [[gnu::always_inline]] const char* next_lines(const char* at) const {
    if (kLines == 0) return at;
    at += kLines * 64;
    return (at - ahead_from) % kPage == 0 ? at + (kPages - 1) * kPage : at;
  }

  template <int kSum>
  struct Index {
    static constexpr int value = kSum;
  };
  template <int kLines, int kSum, int kX, int kWeight, class Begin, class Between>
  [[gnu::always_inline]] static inline void multiply(const char* at, Begin&& begin, Between&& between) {
    begin(Index<kSum>{});
    multiply_add<kSum, kX, kWeight>();
    prefetch<kLines>(at + kSum * kPage);
    between();
  }
  template <int kLines, class Begin, class Between>
  [[gnu::always_inline]] void step(const char* x, const char* w, const char* at, Begin&& begin,
                                   Between&& between) const {
    load<4>(x, x_stride);
    load<6>(w, kStepBytes);
    multiply<kLines, 0, 4, 6>(at, begin, between);
    load<7>(w + 64, kStepBytes);
    multiply<kLines, 1, 4, 7>(at, begin, between);
    if constexpr (kBlocks == 2) {
      load<5>(x + x_block, x_stride);
      multiply<kLines, 2, 5, 6>(at, begin, between);
      multiply<kLines, 3, 5, 7>(at, begin, between);
    } else {
      load<6>(w + 128, kStepBytes);
      multiply<kLines, 2, 4, 6>(at, begin, between);
      load<7>(w + 192, kStepBytes);
      multiply<kLines, 3, 4, 7>(at, begin, between);
    }
  }
};

}  // namespace amx
}  // namespace linear_detail
}  // namespace
}  // namespace serried
