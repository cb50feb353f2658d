// bf16 linears for few tokens on a machine with AMX: by vectors, to the very bits of tdpbf16ps.
//
// The tile instruction is made for 16 tokens; with one or two it keeps the memory waiting (5 % of its speed). Its
// sum over 32 k is defined as two chains of fused multiply-adds from zero, one over the even k and one over the odd,
// then even + odd, then that added to the accumulator; denormals are zero, rounding is to nearest even. So fma gives
// the same bits: csrc/checks/linear_check.cpp holds every batch against every other.
#pragma once
#include <immintrin.h>

#include "linear_drive.hpp"
#include "linear_vector.hpp"

namespace serried {
namespace {
namespace linear_detail {
namespace amx {

constexpr int32_t kFew = 2;            // tokens: beyond that the vector units would be the limit
constexpr int64_t kFewLead = 16384;    // bytes that prefetch runs ahead
constexpr int64_t kFewBlock = 4 * 4096;  // four pages side by side: see linear_amx.hpp

// M tokens' x of one step of 32 k, widened: even and odd k apart.
template <int M>
struct FewInputs {
  alignas(64) float even[M][16];
  alignas(64) float odd[M][16];

  void read(const char* x, int64_t stride) {
    for (int m = 0; m < M; ++m) {
      const __m512i words = _mm512_loadu_si512(x + m * stride);
      _mm512_store_ps(even[m], Vec::even(words));
      _mm512_store_ps(odd[m], Vec::odd(words));
    }
  }
};

// sums[m][output] += the step's products, for V vectors of outputs from `first` on; w: the step's weights; ahead: 1 KB
// of each of four pages to prefetch.
template <int M, int V>
[[gnu::always_inline]] inline void few_step(const char* w, const char* ahead, const FewInputs<M>& x,
                                            float (&sums)[M][kTile], int first) {
  __m512 even[M][V], odd[M][V];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) even[m][v] = odd[m][v] = _mm512_setzero_ps();
  }
  for (int pair = 0; pair < 16; ++pair, w += kStepBytes) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) _mm_prefetch(ahead + 4096 * (first + v) + 64 * pair, _MM_HINT_T1);
    __m512 low[V], high[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const __m512i words = _mm512_load_si512(w + 64 * (first + v));
      low[v] = Vec::even(words);
      high[v] = Vec::odd(words);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m512 a = _mm512_set1_ps(x.even[m][pair]), b = _mm512_set1_ps(x.odd[m][pair]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        even[m][v] = _mm512_fmadd_ps(a, low[v], even[m][v]);
        odd[m][v] = _mm512_fmadd_ps(b, high[v], odd[m][v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* at = sums[m] + 16 * (first + v);
      _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), _mm512_add_ps(even[m][v], odd[m][v])));
    }
  }
}

// One tile of outputs for M tokens, all leaves.
template <int M>
struct FewTile {
  const char *begin, *end;  // of the weights
  alignas(64) float stack[kStackDepth][M][kTile];
  FewInputs<M> inputs;

  void run(const Linear& linear, const char* w, const char* x, int64_t x_stride, float* y, int64_t y_stride,
           int32_t tile) {
    int32_t depth = 0, node = 0;
    const float* bias = linear.bias ? linear.bias + int64_t{tile} * kTile : nullptr;
    for (int32_t i = 0; i < linear.leaf_count; ++i) {
      const Leaf& leaf = linear.leaves[i];
      sum(leaf, w, x, x_stride, stack[depth++]);
      for (int32_t pop = 0; pop < leaf.pops; ++pop, --depth) add(stack[depth - 2], stack[depth - 1]);
      if (!leaf.ends_node) continue;
      put(stack[0], bias, y + node++ * y_stride + int64_t{tile} * kTile, y_stride * linear.nodes);
      depth = 0;
    }
  }

 private:
  const char* ahead(const char* step) const {
    const int64_t steps = (step - begin) / 4096;
    return std::min(begin + kFewLead + steps / 4 * kFewBlock + steps % 4 * 1024, end - kFewBlock);
  }
  void sum(const Leaf& leaf, const char* w, const char* x, int64_t x_stride, float (&sums)[M][kTile]) {
    for (int m = 0; m < M; ++m) {
      for (int v = 0; v < 4; ++v) _mm512_store_ps(sums[m] + 16 * v, _mm512_setzero_ps());
    }
    const int32_t stop = leaf_stop(leaf);
    for (int32_t k = leaf.start; k < stop; k += 32) {
      inputs.read(x + int64_t{k} * 2, x_stride);
      const char* step = w + int64_t{k} * kTile * 2;
      few_step<M, 4>(step, ahead(step), inputs, sums, 0);
    }
  }
  static void add(float (&to)[M][kTile], const float (&from)[M][kTile]) {
    for (int m = 0; m < M; ++m) {
      for (int i = 0; i < kTile; i += 16)
        _mm512_store_ps(to[m] + i, _mm512_add_ps(_mm512_load_ps(to[m] + i), _mm512_load_ps(from[m] + i)));
    }
  }
  static void put(const float (&sums)[M][kTile], const float* bias, float* y, int64_t stride) {
    for (int m = 0; m < M; ++m) {
      for (int i = 0; i < kTile; i += 16) {
        __m512 value = _mm512_load_ps(sums[m] + i);
        if (bias) value = _mm512_add_ps(value, _mm512_loadu_ps(bias + i));
        _mm512_storeu_ps(y + m * stride + i, value);
      }
    }
  }
};

template <int M>
inline void few_tokens(const Linear& linear, const char* x, int64_t x_stride, float* y, int64_t y_stride,
                       int32_t tile_begin, int32_t tile_end) {
  const int64_t bytes = int64_t{linear.inputs} * kTile * 2;
  const char* weight = static_cast<const char*>(linear.weight);
  FewTile<M> tiles;
  tiles.begin = weight + tile_begin * bytes;
  tiles.end = weight + tile_end * bytes;
  for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
    const char* w = weight + tile * bytes;
    tiles.run(linear, w, x, x_stride, y, y_stride, tile);
  }
}

// At most kFew tokens.
inline void linear_few(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                       int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  const int64_t bytes = x_stride * 2;
  const char* from = static_cast<const char*>(x) + token_begin * bytes;
  float* to = y + int64_t{token_begin} * linear.nodes * y_stride;
  switch (token_end - token_begin) {
    case 1: return few_tokens<1>(linear, from, bytes, to, y_stride, tile_begin, tile_end);
    case 2: return few_tokens<2>(linear, from, bytes, to, y_stride, tile_begin, tile_end);
    default: return;
  }
}

}  // namespace amx
}  // namespace linear_detail
}  // namespace
}  // namespace serried
