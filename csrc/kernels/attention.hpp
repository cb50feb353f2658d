// RoPE with the write to the KV cache, and attention.
#pragma once
#include <type_traits>

#include "attention_pass.hpp"
#include "pointwise.hpp"

namespace serried {
namespace {
namespace simd {

// a cos - b sin | b cos + a sin | the columns that are not rotated, after the norm if there is one (scale: 1 / rms,
// weight: its weight).
template <class T>
void rotate_head(const float* x, const float* weight, float eps, const float* cos, const float* sin, int head_dim,
                 int rotary_dim, T* out) {
  const int half = rotary_dim / 2;
  const V scale = weight == nullptr ? V{} : set(inverse_rms(x, head_dim, eps));
  for_columns(half, [&](int64_t i, auto... n) {
    V a = load(x + i, n...), b = load(x + half + i, n...);
    if (weight != nullptr) {
      a = a * scale * load(weight + i, n...);
      b = b * scale * load(weight + half + i, n...);
    }
    const V c = load(cos + i, n...), s = load(sin + i, n...);
    store(out + i, a * c - b * s, n...);
    store(out + half + i, b * c + a * s, n...);
  });
  x += rotary_dim, out += rotary_dim;
  for_columns(head_dim - rotary_dim, [&](int64_t i, auto... n) {
    const V a = load(x + i, n...);
    store(out + i, weight == nullptr ? a : a * scale * load(weight + rotary_dim + i, n...), n...);
  });
}

template <class T>
void rope_write_as(const Attention& op, const float* qkv, int64_t qkv_stride, const int32_t* positions,
                   const int32_t* slots, T* q_out, int64_t q_stride, int32_t begin, int32_t end) {
  const int64_t dim = op.head_dim, kv_dim = op.kv_heads * dim;
  for (int64_t t = begin; t < end; ++t) {
    const float* q = qkv + t * qkv_stride;
    const float* k = q + op.query_heads * dim;
    const float* v = k + kv_dim;
    const int64_t angles = int64_t{positions[t]} * (op.rotary_dim / 2);
    const auto rotate = [&](const float* x, const float* weight, T* out) {
      rotate_head(x, weight, op.norm_eps, op.cos + angles, op.sin + angles, op.head_dim, op.rotary_dim, out);
    };
    T* k_out = static_cast<T*>(op.k_cache) + slots[t] * kv_dim;
    T* v_out = static_cast<T*>(op.v_cache) + slots[t] * kv_dim;
    for (int64_t h = 0; h < op.query_heads; ++h) rotate(q + h * dim, op.q_norm, q_out + t * q_stride + h * dim);
    for (int64_t h = 0; h < op.kv_heads; ++h) rotate(k + h * dim, op.k_norm, k_out + h * dim);
    for_columns(kv_dim, [&](int64_t i, auto... n) { store(v_out + i, load(v + i, n...), n...); });
  }
}

void rope_write(const Attention& op, const float* qkv, int64_t qkv_stride, const int32_t* positions,
                const int32_t* slots, void* q_out, int64_t q_stride, int32_t begin, int32_t end) {
  with_row(q_out, op.dtype, 0,
           [&](auto* q) { rope_write_as(op, qkv, qkv_stride, positions, slots, q, q_stride, begin, end); });
}

int64_t attend_scratch(const Attention& op) {
  const int64_t dim = padded_dim(op.head_dim), turned = dim * kAttentionBlock;
  return kAlign + turned + kAttentionSegment * kPair + kSpareRows * (3 * dim + kScoreStride);
}

template <class T>
void attend_as(const Attention& op, const Sequence& sequence, const int32_t* positions, const T* q, int64_t q_stride,
               T* out, int64_t out_stride, int32_t row_begin, int32_t row_end, int32_t head_begin, int32_t head_end,
               float* scratch) {
  Pass<T> pass(op, sequence, scratch);
  const int tokens = row_end - row_begin;
  begin_tiles();
  for (int head = head_begin; head < head_end;) {
    // As many groups as fit with all tokens; or one group with as many tokens as fit.
    Group groups[kPassRows];
    int count = 0, rows = 0, per_token = 0;
    while (head < head_end && count < kPassRows) {
      int heads = 1;
      while (heads < kPassRows && head + heads < head_end && op.kv_map[head + heads] == op.kv_map[head]) ++heads;
      if (count > 0 && rows + heads * tokens > kPassRows) break;
      groups[count++] = {op.kv_map[head], head, heads, rows};
      head += heads, per_token += heads, rows += heads * tokens;
    }
    const int step = kPassRows / per_token < tokens ? kPassRows / per_token : tokens;
    for (int t = row_begin; t < row_end; t += step)
      pass.run(positions, q, q_stride, out, out_stride, groups, count, t, row_end - t < step ? row_end - t : step);
  }
  end_tiles();
}

void attend(const Attention& op, const Sequence& sequence, const int32_t* positions, const void* q, int64_t q_stride,
            void* out, int64_t out_stride, int32_t row_begin, int32_t row_end, int32_t head_begin, int32_t head_end,
            float* scratch) {
  with_row(out, op.dtype, 0, [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    attend_as<T>(op, sequence, positions, static_cast<const T*>(q), q_stride, to, out_stride, row_begin, row_end,
                 head_begin, head_end, scratch);
  });
}

}  // namespace simd

using simd::attend;
using simd::attend_scratch;
using simd::rope_write;

}  // namespace
}  // namespace serried
