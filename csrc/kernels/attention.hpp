// RoPE with the write to the KV cache, and causal attention over the paged cache.
//
// A pass takes up to 64 rows, a row being a token and a query head: in prefill many tokens of the heads that share one
// KV head, in decode all heads of one token, so that K and V are read once and in the order of memory. For a segment
// of 256 positions: all scores; then each row's maximum, weights and their sum; then the weighted sum of V; then the
// merge. A row's arithmetic is bounded by what it sees itself, so nothing masked is ever multiplied (0 * NaN) and the
// rows beside it leave no trace.
#pragma once
#include "attention_tiles.hpp"
#include "kernels.hpp"
#include "pointwise.hpp"
#include "simd.hpp"

namespace serried {
namespace {
namespace simd {

// a cos - b sin | b cos + a sin, after the norm if there is one (scale: 1 / rms, weight: its weight).
template <class T>
void rotate_head(const float* x, const float* weight, float eps, const float* cos, const float* sin, int head_dim,
                 T* out) {
  const int half = head_dim / 2;
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
}

template <class T>
void rope_write_as(const Attention& op, const float* qkv, int64_t qkv_stride, const int32_t* positions,
                   const int32_t* slots, T* q_out, int64_t q_stride, int32_t begin, int32_t end) {
  const int64_t dim = op.head_dim, kv_dim = op.kv_heads * dim;
  for (int64_t t = begin; t < end; ++t) {
    const float* q = qkv + t * qkv_stride;
    const float* k = q + op.query_heads * dim;
    const float* v = k + kv_dim;
    const float* cos = op.cos + positions[t] * (dim / 2);
    const float* sin = op.sin + positions[t] * (dim / 2);
    T* k_out = static_cast<T*>(op.k_cache) + slots[t] * kv_dim;
    T* v_out = static_cast<T*>(op.v_cache) + slots[t] * kv_dim;
    for (int64_t h = 0; h < op.query_heads; ++h)
      rotate_head(q + h * dim, op.q_norm, op.norm_eps, cos, sin, op.head_dim, q_out + t * q_stride + h * dim);
    for (int64_t h = 0; h < op.kv_heads; ++h)
      rotate_head(k + h * dim, op.k_norm, op.norm_eps, cos, sin, op.head_dim, k_out + h * dim);
    for_columns(kv_dim, [&](int64_t i, auto... n) { store(v_out + i, load(v + i, n...), n...); });
  }
}

void rope_write(const Attention& op, const float* qkv, int64_t qkv_stride, const int32_t* positions,
                const int32_t* slots, void* q_out, int64_t q_stride, int32_t begin, int32_t end) {
  with_row(q_out, op.dtype, 0,
           [&](auto* q) { rope_write_as(op, qkv, qkv_stride, positions, slots, q, q_stride, begin, end); });
}

constexpr int kPassRows = 64;
constexpr int kAlign = 16;  // floats

constexpr int64_t padded_dim(int head_dim) { return (head_dim + 31) / 32 * 32; }

int64_t attend_scratch(const Attention& op) {
  const int64_t dim = padded_dim(op.head_dim), turned = dim * kAttentionBlock;
  return kAlign + turned + kAttentionSegment * kPair + kPassRows * (3 * dim + kScoreStride);
}

// Walks memory that will be wanted next, a few lines at a time, while other work goes on.
struct Ahead {
  const char* const* rows = nullptr;  // each `bytes` long
  int64_t bytes = 0;
  int row = 0, row_end = 0;
  int64_t byte = 0;

  // Fetches about as much as has been consumed.
  void fetch(int64_t consumed) {
    for (; consumed > 0 && row < row_end; consumed -= 64) {
      __builtin_prefetch(rows[row] + byte, 0, 2);
      byte += 64;
      if (byte >= bytes) byte = 0, ++row;
    }
  }
};

// The heads of a pass that share one KV head: rows [row, row + heads * tokens), token by token.
struct Group {
  int kv_head, head, heads, row;
};

template <class T>
class Pass {
 public:
  Pass(const Attention& op, const Sequence& sequence, float* scratch) : op_(op), sequence_(sequence) {
    const auto address = reinterpret_cast<uintptr_t>(scratch);
    scratch += (64 - address % 64) % 64 / 4;
    dim_ = padded_dim(op.head_dim);
    kt_ = scratch;
    packed_ = kt_ + dim_ * kAttentionBlock;
    q_ = reinterpret_cast<uint32_t*>(packed_ + kAttentionSegment * kPair);
    segment_out_ = packed_ + kAttentionSegment * kPair + kPassRows * dim_;
    out_ = segment_out_ + kPassRows * dim_;
    scores_ = out_ + kPassRows * dim_;
  }

  void run(const int32_t* positions, const T* q, int64_t q_stride, T* out, int64_t out_stride, const Group* groups,
           int group_count, int token, int tokens) {
    groups_ = groups, group_count_ = group_count, token_ = token, tokens_ = tokens;
    find_ranges(positions);
    load_queries(q, q_stride);
    for (int s = low_ / kAttentionSegment; s * kAttentionSegment < high_; ++s) {
      begin_ = s * kAttentionSegment;
      from_ = low_ > begin_ ? (low_ - begin_) / kAttentionBlock : 0;
      const int seen = high_ - begin_ < kAttentionSegment ? high_ - begin_ : kAttentionSegment;
      to_ = (seen + kAttentionBlock - 1) / kAttentionBlock;
      locate(seen);
      score_segment();
      for (int r = 0; r < rows_; ++r) weigh_row(r);
      add_segment();
      for (int r = 0; r < rows_; ++r) merge_row(r);
    }
    write(out, out_stride);
  }

 private:
  static constexpr int kBlocks = kAttentionSegment / kAttentionBlock;

  // What each row sees, [low, high), and the pass as a whole.
  void find_ranges(const int32_t* positions) {
    rows_ = 0, low_ = INT32_MAX, high_ = 0;
    for (int g = 0; g < group_count_; ++g) {
      for (int t = token_; t < token_ + tokens_; ++t) {
        const int high = positions[t] + 1;
        const int low = op_.window > 0 && high > op_.window ? high - op_.window : 0;
        for (int h = 0; h < groups_[g].heads; ++h, ++rows_) row_low_[rows_] = low, row_high_[rows_] = high;
        low_ = low < low_ ? low : low_, high_ = high > high_ ? high : high_;
      }
    }
  }

  // Queries as the words that score_tile multiplies: a tile is [step][its rows].
  void load_queries(const T* q, int64_t q_stride) {
    for (int g = 0; g < group_count_; ++g) {
      const Group& group = groups_[g];
      for (int i = 0, rows = rows_of(group); i < rows; ++i) {
        const T* from = q + (token_ + i / group.heads) * q_stride + (group.head + i % group.heads) * op_.head_dim;
        const int first = i / kTileRows * kTileRows, count = rows - first < kTileRows ? rows - first : kTileRows;
        load_query(from, q_ + (group.row + first) * dim_ + (i - first), count);
      }
    }
  }

  void load_query(const T* from, uint32_t* to, int count) {
    for (int i = 0; i < steps<T>(op_.head_dim); ++i, to += count) {
      if constexpr (kIsBf16<T> && !kPairSteps<T>) {
        *to = uint32_t{from[i].bits} << 16;
      } else {
        std::memcpy(to, reinterpret_cast<const char*>(from) + 4 * i, 4);
      }
    }
  }

  // Element offsets of the segment's positions in the cache, and of the next segment's first block. Beyond the last
  // position that any row sees the last one stands in: its keys are masked, its values are not reached.
  void locate(int seen) {
    const int64_t slot_size = int64_t{op_.kv_heads} * op_.head_dim;
    const int count = high_ - begin_ < kAttentionSegment + kAttentionBlock ? high_ - begin_
                                                                          : kAttentionSegment + kAttentionBlock;
    const int first = from_ * kAttentionBlock;
    int block = (begin_ + first) / op_.block_size, inside = (begin_ + first) % op_.block_size;
    for (int i = first; i < count; ++i) {
      offsets_[i] = (int64_t{sequence_.blocks[block]} * op_.block_size + inside) * slot_size;
      if (++inside == op_.block_size) inside = 0, ++block;
    }
    for (int i = seen; i < to_ * kAttentionBlock; ++i) offsets_[i] = offsets_[seen - 1];
    for (int i = count > seen ? count : seen; i < kAttentionSegment + kAttentionBlock; ++i) offsets_[i] = offsets_[count - 1];
  }

  const T* keys(int kv_head) const { return static_cast<const T*>(op_.k_cache) + kv_head * op_.head_dim; }
  const T* values(int kv_head) const { return static_cast<const T*>(op_.v_cache) + kv_head * op_.head_dim; }

  int rows_of(const Group& group) const { return group.heads * tokens_; }

  void score_segment() {
    for (int b = from_; b < to_; ++b) {
      const bool last = b + 1 == to_;
      plan_ahead(last ? values(0) : keys(0), last ? from_ : b + 1);
      for (int g = 0; g < group_count_; ++g) score_block(groups_[g], b, share(g));
    }
  }

  // Scores of one block for the rows of a group; tiles that see nothing of it are left out.
  void score_block(const Group& group, int b, Ahead ahead) {
    const char* rows[kAttentionBlock];
    const T* k = keys(group.kv_head);
    for (int i = 0; i < kAttentionBlock; ++i)
      rows[i] = reinterpret_cast<const char*>(k + offsets_[b * kAttentionBlock + i]);
    turn_keys<T>(rows, op_.head_dim, kt_, ahead);
    const int first = begin_ + b * kAttentionBlock, end = group.row + rows_of(group);
    for (int row = group.row; row < end; row += kTileRows) {
      const int count = end - row < kTileRows ? end - row : kTileRows;
      if (row_high_[row + count - 1] <= first || row_low_[row] >= first + kAttentionBlock) continue;
      with_rows(count, [&](auto constant) {
        score_tile<T, decltype(constant)::value>(q_ + row * dim_, kt_, steps<T>(op_.head_dim), op_.scale,
                                                 scores_ + row * kScoreStride + b * kAttentionBlock);
      });
    }
  }

  // A row's part of the segment, [low, high) counted from its begin; false if there is none.
  bool inside(int row, int* low, int* high) const {
    *low = row_low_[row] > begin_ ? row_low_[row] - begin_ : 0;
    *high = row_high_[row] - begin_ < kAttentionSegment ? row_high_[row] - begin_ : kAttentionSegment;
    return *low < *high;
  }

  // Scores become exp(score - maximum); what the row does not see becomes 0. Lane j sums positions j, j + lanes, ...
  [[gnu::noinline]] void weigh_row(int row) {
    int low, high;
    if (!inside(row, &low, &high)) return;
    float* s = scores_ + row * kScoreStride;
    const int first = low / kLanes * kLanes, end = (high + kLanes - 1) / kLanes * kLanes;
    const V nothing = set(-__builtin_inff());
    V top = nothing, total{};
    for (int i = first; i < end; i += kLanes) {
      if (i < low || i + kLanes > high) {
        const I at = iota() + i;
        store(s + i, ((at >= low) & (at < high)) ? load(s + i) : nothing);
      }
      top = max(top, load(s + i));
    }
    const float most = largest(top);
    for (int i = first; i < end; i += kLanes) {
      const V p = exp(load(s + i) - set(most));
      store(s + i, p);
      total = total + p;
    }
    segment_max_[row] = most;
    segment_sum_[row] = sum(total);
  }

  void add_segment() {
    std::memset(segment_out_, 0, sizeof(float) * static_cast<size_t>(rows_ * dim_));
    add_blocks(begin_ + kAttentionSegment < high_ ? kBlocks : 0);
  }

  // One group takes the segment as a whole, several take turns block by block, so that memory is read in one line.
  // next: the block of keys that follows (0: none).
  void add_blocks(int next) {
    const int step = group_count_ == 1 ? to_ - from_ : 1;
    for (int b = from_; b < to_; b += step) {
      if (b + step < to_) {
        plan_ahead(values(0), b + step);
      } else if (next > 0) {
        plan_ahead(keys(0), next);
      } else {
        ahead_.row_end = 0;
      }
      for (int g = 0; g < group_count_; ++g) {
        share(g).fetch(INT64_MAX);
        add_range(groups_[g], b * kAttentionBlock, (b + step) * kAttentionBlock);
      }
    }
  }

  // Several tiles of rows: the values are packed for them, kPair columns at a time (32 KiB for the segment).
  void add_range(const Group& group, int from, int to) {
    const Scattered<T> all{values(group.kv_head), offsets_};
    if (rows_of(group) <= kTileRows) return add_tiles(all, group, from, to, 0);
    const int low = low_ - begin_ > from ? low_ - begin_ : from, high = high_ - begin_ < to ? high_ - begin_ : to;
    for (int c = 0; c < op_.head_dim; c += kPair) {
      pack_values(all, c, op_.head_dim - c, low, high, packed_);
      add_tiles(Packed{packed_}, group, from, to, c);
    }
  }

  template <class Source>
  void add_tiles(Source values, const Group& group, int from, int to, int column) {
    for (int row = group.row, end = row + rows_of(group); row < end; row += kTileRows)
      add_tile(values, row, end - row < kTileRows ? end - row : kTileRows, from, to, column);
  }

  // Positions that all rows of the tile see go together; before and after them each row takes what it sees alone.
  template <class Source>
  void add_tile(Source values, int row, int count, int from, int to, int column) {
    int lows[kTileRows], highs[kTileRows], low = from, high = to;
    for (int r = 0; r < count; ++r) {
      inside(row + r, &lows[r], &highs[r]);
      lows[r] = lows[r] > from ? lows[r] : from, highs[r] = highs[r] < to ? highs[r] : to;
      low = lows[r] > low ? lows[r] : low, high = highs[r] < high ? highs[r] : high;
    }
    if (low >= high) low = high = to;
    for (int r = 0; r < count; ++r) add_rows<1>(values, row + r, lows[r], highs[r] < low ? highs[r] : low, column);
    with_rows(count, [&](auto constant) { add_rows<decltype(constant)::value>(values, row, low, high, column); });
    for (int r = 0; r < count; ++r) add_rows<1>(values, row + r, high > lows[r] ? high : lows[r], highs[r], column);
  }

  template <int R, class Source>
  void add_rows(Source values, int row, int from, int to, int column) {
    if (from >= to) return;
    value_rows<R>(values, op_.head_dim, scores_ + row * kScoreStride, from, to, segment_out_ + row * dim_ + column,
                  dim_);
  }

  // The first segment that a row sees is taken as it is; each later one is rescaled to the common maximum and added.
  void merge_row(int row) {
    int low, high;
    if (!inside(row, &low, &high)) return;
    float* total = out_ + row * dim_;
    const float* part = segment_out_ + row * dim_;
    if (row_low_[row] >= begin_) {
      std::memcpy(total, part, sizeof(float) * static_cast<size_t>(dim_));
      max_[row] = segment_max_[row], sum_[row] = segment_sum_[row];
      return;
    }
    const float old = max_[row], top = segment_max_[row] > old ? segment_max_[row] : old;
    const float a = exp_one(old - top), b = exp_one(segment_max_[row] - top);
    for (int64_t i = 0; i < dim_; i += kLanes) store(total + i, fma(load(part + i), set(b), load(total + i) * set(a)));
    max_[row] = top, sum_[row] = sum_[row] * a + segment_sum_[row] * b;
  }

  void write(T* out, int64_t out_stride) const {
    int row = 0;
    for (int g = 0; g < group_count_; ++g) {
      for (int t = token_; t < token_ + tokens_; ++t) {
        T* to = out + t * out_stride + groups_[g].head * op_.head_dim;
        for (int h = 0; h < groups_[g].heads; ++h, ++row, to += op_.head_dim) write_row(row, to);
      }
    }
  }

  void write_row(int row, T* to) const {
    const float* total = out_ + row * dim_;
    const V sum = set(sum_[row]);
    for (int i = 0; i < op_.head_dim; i += kPair) {
      const int n = op_.head_dim - i < kPair ? op_.head_dim - i : kPair;
      store_pair(to + i, {load(total + i) / sum, load(total + i + kLanes) / sum}, n);
    }
  }

  // The memory of all groups in a block of keys or values, to be fetched in one straight line.
  void plan_ahead(const T* base, int b) {
    int first = groups_[0].kv_head, last = first;
    for (int g = 1; g < group_count_; ++g) {
      first = groups_[g].kv_head < first ? groups_[g].kv_head : first;
      last = groups_[g].kv_head > last ? groups_[g].kv_head : last;
    }
    for (int i = 0; i < kAttentionBlock; ++i)
      ahead_rows_[i] = reinterpret_cast<const char*>(base + first * op_.head_dim + offsets_[b * kAttentionBlock + i]);
    ahead_ = {ahead_rows_, (last + 1 - first) * op_.head_dim * static_cast<int64_t>(sizeof(T)), 0, kAttentionBlock, 0};
  }

  // Group g's part of it.
  Ahead share(int g) const {
    Ahead part = ahead_;
    part.row = ahead_.row_end * g / group_count_, part.row_end = ahead_.row_end * (g + 1) / group_count_;
    return part;
  }

  const Attention& op_;
  const Sequence& sequence_;
  int64_t dim_;  // of a row in scratch
  float *kt_, *packed_, *segment_out_, *out_, *scores_;
  uint32_t* q_;
  const Group* groups_;
  int group_count_, token_, tokens_, rows_, low_, high_;
  int begin_, from_, to_;  // the segment's first position, and its blocks that any row sees
  int row_low_[kPassRows], row_high_[kPassRows];
  float segment_max_[kPassRows], segment_sum_[kPassRows], max_[kPassRows], sum_[kPassRows];
  int64_t offsets_[kAttentionSegment + kAttentionBlock];
  const char* ahead_rows_[kAttentionBlock];
  Ahead ahead_;
};

template <class T>
void attend_as(const Attention& op, const Sequence& sequence, const int32_t* positions, const T* q, int64_t q_stride,
               T* out, int64_t out_stride, int32_t row_begin, int32_t row_end, int32_t head_begin, int32_t head_end,
               float* scratch) {
  Pass<T> pass(op, sequence, scratch);
  const int tokens = row_end - row_begin;
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
