// RoPE with the write to the KV cache, and attention.
#pragma once
#include <algorithm>
#include <type_traits>

#if SERRIED_amx
#include "attention_amx_few.hpp"
#include "attention_amx_many.hpp"
#endif
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

// The lines of a row that is about to be written come from memory meanwhile.
template <class T>
[[gnu::always_inline]] inline void fetch_row(const T* row, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + i, 1);
}

template <class T>
void rope_write_as(const Attention& op, const float* qkv, int64_t qkv_stride, const int32_t* positions,
                   const int32_t* slots, T* q_out, int64_t q_stride, int32_t begin, int32_t end, const Heads& heads) {
  const int64_t dim = op.head_dim, kv_dim = op.kv_heads * dim;
  const int64_t kv_first = heads.kv_begin * dim, kv_count = (heads.kv_end - heads.kv_begin) * dim;
  for (int64_t t = begin; t < end; ++t) {
    const float* q = qkv + t * qkv_stride;
    const float* k = q + op.query_heads * dim;
    const float* v = k + kv_dim + kv_first;
    const int64_t angles = int64_t{positions[t]} * (op.rotary_dim / 2);
    const auto rotate = [&](const float* x, const float* weight, T* out) {
      rotate_head(x, weight, op.norm_eps, op.cos + angles, op.sin + angles, op.head_dim, op.rotary_dim, out);
    };
    T* k_out = static_cast<T*>(op.k_cache) + slots[t] * kv_dim;
    T* v_out = static_cast<T*>(op.v_cache) + slots[t] * kv_dim + kv_first;
    fetch_row(k_out + kv_first, kv_count), fetch_row(v_out, kv_count);
    for (int64_t h = heads.query_begin; h < heads.query_end; ++h)
      rotate(q + h * dim, op.q_norm, q_out + t * q_stride + h * dim);
    for (int64_t h = heads.kv_begin; h < heads.kv_end; ++h) rotate(k + h * dim, op.k_norm, k_out + h * dim);
    for_columns(kv_count, [&](int64_t i, auto... n) { store(v_out + i, load(v + i, n...), n...); });
  }
}

void rope_write(const Attention& op, const float* qkv, int64_t qkv_stride, const int32_t* positions,
                const int32_t* slots, void* q_out, int64_t q_stride, int32_t begin, int32_t end, const Heads& heads) {
  with_row(q_out, op.dtype, 0,
           [&](auto* q) { rope_write_as(op, qkv, qkv_stride, positions, slots, q, q_stride, begin, end, heads); });
}

int64_t attend_scratch(const Attention& op) {
  int64_t most = Pass<float>::scratch(op);
#if SERRIED_amx
  most = std::max({most, FewRows::scratch(op), ManyRows::scratch(op)});
#endif
  return most;
}

// What a call of attend is asked for.
template <class T>
struct Wanted {
  const int32_t* positions;
  const T* q;
  int64_t q_stride;
  T* out;
  int64_t out_stride;
  int32_t row_begin, row_end, head_begin, head_end;
};

// Heads from `head` on that share a KV head, at most kPassRows of them.
template <class T>
Group next_group(const Attention& op, const Wanted<T>& wanted, int head, int row) {
  int heads = 1;
  while (heads < kPassRows && head + heads < wanted.head_end && op.kv_map[head + heads] == op.kv_map[head]) ++heads;
  return {op.kv_map[head], head, heads, row};
}

// Groups from `head` on that fit into a pass with all tokens, each of at most `most` rows; or one group.
template <class T>
int fill_pass(const Attention& op, const Wanted<T>& wanted, int head, int most, Group* groups) {
  const int tokens = wanted.row_end - wanted.row_begin;
  int count = 0, rows = 0;
  while (head < wanted.head_end && count < kPassRows) {
    const Group group = next_group(op, wanted, head, rows);
    const int more = group.heads * tokens;
    if (count > 0 && (rows + more > kPassRows || more > most || groups[0].heads * tokens > most)) break;
    groups[count++] = group;
    head += group.heads, rows += more;
  }
  return count;
}

// Runs f(first token, tokens) until all tokens have had their turn, with as many rows a time as `most` allows.
template <class T, class F>
void by_tokens(const Wanted<T>& wanted, int rows_per_token, int most, F f) {
  const int tokens = wanted.row_end - wanted.row_begin, fit = most / rows_per_token;
  const int step = fit < tokens ? fit : tokens;
  for (int t = wanted.row_begin; t < wanted.row_end; t += step)
    f(t, wanted.row_end - t < step ? wanted.row_end - t : step);
}

int heads_of(const Group* groups, int count) {
  return groups[count - 1].head + groups[count - 1].heads - groups[0].head;
}

// The sequence as a pass is to see it that does not do all that is wanted: neighbours are for those that do.
template <class T>
Sequence seen_by(const Sequence& sequence, const Wanted<T>& wanted, int heads) {
  Sequence seen = sequence;
  if (heads < wanted.head_end - wanted.head_begin) seen.next = nullptr, seen.begun = false;
  return seen;
}

template <class T>
void attend_as(const Attention& op, const Sequence& sequence, const Wanted<T>& wanted, float* scratch) {
  Group groups[kPassRows];
  for (int head = wanted.head_begin; head < wanted.head_end;) {
    const int count = fill_pass(op, wanted, head, kPassRows, groups), heads = heads_of(groups, count);
    const bool whole = heads * (wanted.row_end - wanted.row_begin) <= kPassRows;
    const Sequence seen = seen_by(sequence, wanted, whole ? heads : 0);
    Pass<T> pass(op, seen, scratch);
    by_tokens(wanted, heads, kPassRows, [&](int token, int tokens) {
      pass.run(wanted.positions, wanted.q, wanted.q_stride, wanted.out, wanted.out_stride, groups, count, token,
               tokens);
    });
    head += heads;
  }
}

#if SERRIED_amx
template <>
void attend_as(const Attention& op, const Sequence& sequence, const Wanted<Bf16>& wanted, float* scratch) {
  Tiles tiles;
  Group groups[kPassRows];
  for (int head = wanted.head_begin; head < wanted.head_end;) {
    const int count = fill_pass(op, wanted, head, kFewRows, groups), heads = heads_of(groups, count);
    if (groups[0].heads * (wanted.row_end - wanted.row_begin) <= kFewRows) {
      const Sequence seen = seen_by(sequence, wanted, heads);
      FewRows pass(op, seen, scratch, tiles);
      pass.run(wanted.positions, wanted.q, wanted.q_stride, wanted.out, wanted.out_stride, groups, count,
               wanted.row_begin, wanted.row_end - wanted.row_begin);
    } else {
      const Sequence alone = seen_by(sequence, wanted, 0);
      ManyRows pass(op, alone, scratch, tiles);
      by_tokens(wanted, heads, ManyRows::kMany, [&](int token, int tokens) {
        pass.run(wanted.positions, wanted.q, wanted.q_stride, wanted.out, wanted.out_stride, groups[0], token, tokens);
      });
    }
    head += heads;
  }
}
#endif

void attend(const Attention& op, const Sequence& sequence, const int32_t* positions, const void* q, int64_t q_stride,
            void* out, int64_t out_stride, int32_t row_begin, int32_t row_end, int32_t head_begin, int32_t head_end,
            float* scratch) {
  with_row(out, op.dtype, 0, [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    attend_as(op, sequence,
              Wanted<T>{positions, static_cast<const T*>(q), q_stride, to, out_stride, row_begin, row_end, head_begin,
                        head_end},
              scratch);
  });
}

}  // namespace simd

using simd::attend;
using simd::attend_scratch;
using simd::rope_write;

}  // namespace
}  // namespace serried
