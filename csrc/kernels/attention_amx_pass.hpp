// Passes of attention by tiles of AMX, for a cache in bf16. FewRows: up to 16 rows for each of several KV heads, all of
// which are read block by block in the order of memory (decode). ManyRows: up to 256 rows of one KV head; keys are
// turned and values packed once a segment for all of them, and what is multiplied again and again stays in caches.
//
// A tile multiplies whatever its rows do not see by a weight of 0. Positions that no row of the pass sees are zeros
// then; others may be NaN or infinite. Where they are, each row goes alone, with zeros where it does not see: the same
// bits as long as all is finite, and no trace of what is masked.
#pragma once
#include "attention_amx.hpp"
#include "attention_rows.hpp"

namespace serried {
namespace {
namespace simd {

constexpr int kFewRows = 16;

class TileRows : protected Rows {
 protected:
  TileRows(const Attention& op, const Sequence& sequence, Tiles& tiles) : Rows(op, sequence, sizeof(Bf16)), tiles_(tiles) {}

  // Packs the segment's block b, but what lies outside of [low, high).
  void pack(int kv_head, int b, int low, int high, uint32_t* to, Ahead& ahead) const {
    const Bf16 *v = values<Bf16>(kv_head), *rows[kAttentionBlock];
    for (int i = 0; i < kAttentionBlock; ++i) {
      const int position = begin_ + b * kAttentionBlock + i;
      rows[i] = position >= low && position < high ? v + offsets_[position - begin_] : nullptr;
    }
    pack_block(rows, op_.head_dim, to, ahead);
  }

  // Whether rows [row, row + count) see different parts of block b, and what was packed of it for all is not finite.
  bool must_part(int row, int count, int b, const uint32_t* packed) const {
    const int first = begin_ + b * kAttentionBlock, end = first + kAttentionBlock;
    const auto at = [&](int position) { return position < first ? first : position > end ? end : position; };
    const bool alike = at(row_low_[row]) == at(row_low_[row + count - 1]) &&
                       at(row_high_[row]) == at(row_high_[row + count - 1]) && at(row_low_[row]) == at(low_) &&
                       at(row_high_[row]) == at(high_);
    return !alike && !finite(packed, dim_);
  }

  // A row's scores of the blocks [from, to) become weights, as words; zeros where the row sees nothing.
  [[gnu::noinline]] void weigh(int row, float* s, int from, int to) {
    int low = 0, high = 0;
    const bool any = inside(row, &low, &high);
    const int begin = any ? block_begin(low) : 0, end = any ? block_end(high) : 0;
    for (int i = from * kAttentionBlock; i < to * kAttentionBlock; i += kLanes)
      if (i < begin || i >= end) store(s + i, V{});
    if (!any) return;
    const V most = set(scale_row(row, s, low, high));
    V total{};
    for (int i = begin; i < end; i += kAttentionBlock) {
      const V a = exp_weight(load(s + i) - most), b = exp_weight(load(s + i + kLanes) - most);
      total = total + a + b;
      split_weights(a, b, s + i);
    }
    segment_sum_[row] = sum(total);
  }

  void merge(int row, float* total, const float* part) {
    merge_row(row, total, [=](int64_t i) { return load(part + i) + V{}; });
  }

  Tiles& tiles_;
};

class FewRows : TileRows {
 public:
  static int64_t scratch(const Attention& op) {
    const int64_t dim = padded_dim(op.head_dim);
    return kAlign + 3 * 16 * dim + kFew * (2 * dim + dim / 2 + kScoreStride) + kFewRows;
  }

  FewRows(const Attention& op, const Sequence& sequence, float* scratch, Tiles& tiles) : TileRows(op, sequence, tiles) {
    keys_ = aligned(scratch);
    packed_ = reinterpret_cast<uint32_t*>(keys_ + 16 * dim_);
    alone_ = packed_ + 16 * dim_;
    sums_ = keys_ + 3 * 16 * dim_;
    out_ = sums_ + kFew * dim_;
    scores_ = out_ + kFew * dim_;
    q_ = reinterpret_cast<uint32_t*>(scores_ + kFew * kScoreStride);
  }

  // At most kFewRows rows a group, kFew in all.
  void run(const int32_t* positions, const Bf16* q, int64_t q_stride, Bf16* out, int64_t out_stride,
           const Group* groups, int group_count, int token, int tokens) {
    begin_rows(positions, groups, group_count, token, tokens);
    load_queries(q, q_stride);
    for (int s = first_segment(); s * kAttentionSegment < high_; ++s) {
      begin_segment(s);
      if (begin_ <= low_) start_stream();
      tiles_.use(rows_of(groups_[0]));
      for (int b = from_; b < to_; ++b) {
        plan_ahead(b - from_ + distance_);
        for (int g = 0; g < group_count_; ++g) score_block(groups_[g], b, share(g));
      }
      for (int r = 0; r < rows_; ++r) weigh(r, row_scores(r), from_, to_);
      for (int b = from_; b < to_; ++b) {
        plan_ahead(to_ - from_ + b - from_ + distance_);
        for (int g = 0; g < group_count_; ++g) add_values(groups_[g], b, share(g));
      }
      for (int r = 0; r < rows_; ++r) merge(r, out_ + r * dim_, sums_ + r * dim_);
    }
    write(out_, out, out_stride);
  }

 private:
  static constexpr int kFew = 64;  // rows of all groups

  float* row_scores(int row) const { return scores_ + row * kScoreStride; }

  // [step][rows] for each group.
  void load_queries(const Bf16* q, int64_t q_stride) {
    for (int g = 0; g < group_count_; ++g) {
      const Group& group = groups_[g];
      const int rows = rows_of(group);
      for (int i = 0, t = token_, h = 0; i < rows; ++i) {
        const Bf16* from = q + t * q_stride + (group.head + h) * op_.head_dim;
        uint32_t* to = q_ + group.row * (dim_ / 2) + i;
        for (int d = 0; d < op_.head_dim / 2; ++d, to += rows) std::memcpy(to, from + 2 * d, 4);
        for (int64_t d = op_.head_dim / 2; d < dim_ / 2; ++d, to += rows) *to = 0;
        if (++h == group.heads) h = 0, ++t;
      }
    }
  }

  // Keys are not turned, and where 16 positions lie side by side not even moved.
  void score_block(const Group& group, int b, Ahead ahead) {
    const int first = begin_ + b * kAttentionBlock, rows = rows_of(group);
    const int tiles = first + 16 < high_ ? 2 : 1;
    const bool whole = op_.block_size % 16 == 0 && op_.head_dim % 32 == 0 && first + 16 * tiles <= high_;
    const Bf16* k = keys<Bf16>(group.kv_head);
    const uint32_t* q = q_ + group.row * (dim_ / 2);
    const char* from[2];
    int64_t stride = int64_t{op_.kv_heads} * op_.head_dim * 2;
    if (whole) {
      for (int t = 0; t < 2; ++t) from[t] = reinterpret_cast<const char*>(k + offsets_[b * kAttentionBlock + 16 * t]);
    } else {
      char* to = reinterpret_cast<char*>(keys_);
      stride = dim_ * 2, from[0] = to, from[1] = to + 16 * stride;
      for (int i = 0; i < 16 * tiles; ++i, to += stride) {
        std::memcpy(to, k + offsets_[b * kAttentionBlock + i], 2 * static_cast<size_t>(op_.head_dim));
        std::memset(to + 2 * op_.head_dim, 0, 2 * static_cast<size_t>(dim_ - op_.head_dim));
      }
    }
    alignas(64) float out[2 * kTileWords];
    float* scores = row_scores(group.row) + b * kAttentionBlock;
    if (tiles == 2) {
      score_keys<2>(from, stride, q, rows, op_.head_dim / 2, out, ahead);
      turn_scores(out + kTileWords, rows, scores + 16);
    } else {
      score_keys<1>(from, stride, q, rows, op_.head_dim / 2, out, ahead);
    }
    turn_scores(out, rows, scores);
    ahead.fetch_rest();
  }

  void add_values(const Group& group, int b, Ahead ahead) {
    const int rows = rows_of(group);
    const bool first = b == from_;
    pack(group.kv_head, b, low_, high_, packed_, ahead);
    if (must_part(group.row, rows, b, packed_)) {
      tiles_.use(1);
      for (int r = group.row; r < group.row + rows; ++r) {
        pack(group.kv_head, b, row_low_[r], row_high_[r], alone_, ahead);
        add_block(row_scores(r) + b * kAttentionBlock, alone_, dim_, sums_ + r * dim_, first, ahead);
      }
    } else {
      tiles_.use(rows);
      add_block(row_scores(group.row) + b * kAttentionBlock, packed_, dim_, sums_ + group.row * dim_, first, ahead);
    }
    ahead.fetch_rest();
  }

  float *keys_, *sums_, *out_, *scores_;
  uint32_t *packed_, *alone_, *q_;
};

class ManyRows : TileRows {
 public:
  static constexpr int kMany = Rows::kMost;

  static int64_t scratch(const Attention& op) {
    const int64_t dim = padded_dim(op.head_dim);
    const int64_t segment = 2 * kSegmentBlocks * 16 * dim, rows = kMany * dim + (kMany + 16) * dim / 2;
    return kAlign + segment + 16 * dim + kChunk * (kScoreStride + dim) + rows;
  }

  ManyRows(const Attention& op, const Sequence& sequence, float* scratch, Tiles& tiles)
      : TileRows(op, sequence, tiles) {
    kt_ = aligned(scratch);
    packed_ = reinterpret_cast<uint32_t*>(kt_ + kSegmentBlocks * 16 * dim_);
    alone_ = packed_ + kSegmentBlocks * 16 * dim_;
    scores_ = reinterpret_cast<float*>(alone_ + 16 * dim_);
    sums_ = scores_ + kChunk * kScoreStride;
    out_ = sums_ + kChunk * dim_;
    q_ = reinterpret_cast<uint32_t*>(out_ + kMany * dim_);
    const int64_t turned = (words<Bf16>(op.head_dim) + 3) / 4 * 4;  // steps that turn_keys writes
    for (int b = 0; b < kSegmentBlocks; ++b)
      std::memset(turned_keys(b) + turned * kAttentionBlock, 0,
                  sizeof(float) * static_cast<size_t>((dim_ / 2 - turned) * kAttentionBlock));
  }

  // At most kMany rows of one group.
  void run(const int32_t* positions, const Bf16* q, int64_t q_stride, Bf16* out, int64_t out_stride, const Group& group,
           int token, int tokens) {
    begin_rows(positions, &group, 1, token, tokens);
    load_queries(q, q_stride);
    tiles_.use(16);
    for (int s = first_segment(); s * kAttentionSegment < high_; ++s) {
      begin_segment(s);
      prepare();
      for (int row = 0; row < rows_; row += kChunk) attend_rows(row, rows_ - row < kChunk ? rows_ - row : kChunk);
    }
    write(out_, out, out_stride);
  }

 private:
  static constexpr int kChunk = 32;  // rows that go together

  float* turned_keys(int b) const { return kt_ + b * 16 * dim_; }
  uint32_t* packed(int b) const { return packed_ + b * 16 * dim_; }

  void load_queries(const Bf16* q, int64_t q_stride) {
    const Group& group = groups_[0];
    uint32_t* to = q_;
    for (int t = token_; t < token_ + tokens_; ++t) {
      const Bf16* from = q + t * q_stride + group.head * op_.head_dim;
      for (int h = 0; h < group.heads; ++h, from += op_.head_dim, to += dim_ / 2) {
        std::memcpy(to, from, 2 * static_cast<size_t>(op_.head_dim));
        std::memset(to + op_.head_dim / 2, 0, 2 * static_cast<size_t>(dim_ - op_.head_dim));
      }
    }
  }

  // Turns the segment's keys and packs its values. The first segment is fetched block by block; others have been.
  void prepare() {
    const Group& group = groups_[0];
    const bool first = begin_ <= low_;
    if (first) start_stream();
    for (int b = from_; b < to_; ++b) {
      if (first) plan_ahead(b - from_ + distance_);
      const char* rows[kAttentionBlock];
      const Bf16* k = keys<Bf16>(group.kv_head);
      for (int i = 0; i < kAttentionBlock; ++i)
        rows[i] = reinterpret_cast<const char*>(k + offsets_[b * kAttentionBlock + i]);
      turn_keys<Bf16>(rows, op_.head_dim, turned_keys(b), first ? ahead_ : Ahead{});
    }
    for (int b = from_; b < to_; ++b) {
      if (first) plan_ahead(to_ - from_ + b - from_ + distance_);
      Ahead ahead = first ? ahead_ : Ahead{};
      pack(group.kv_head, b, low_, high_, packed(b), ahead);
      ahead.fetch_rest();
    }
    next_ = kAttentionSegment;
    const int last = high_ - begin_ < kLocated ? high_ - begin_ : kLocated;
    const int turns = (rows_ + kChunk - 1) / kChunk * (to_ - from_);
    share_ = last > next_ ? (last - next_ + turns - 1) / turns : 0;
    last_ = last;
  }

  // Fetches a part of the next segment's keys and values.
  void fetch_next() {
    const int64_t bytes = 2 * int64_t{op_.head_dim};
    const Bf16 *k = keys<Bf16>(groups_[0].kv_head), *v = values<Bf16>(groups_[0].kv_head);
    for (const int end = next_ + share_ < last_ ? next_ + share_ : last_; next_ < end; ++next_) {
      for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(k + offsets_[next_]) + i, 0, 2);
        __builtin_prefetch(reinterpret_cast<const char*>(v + offsets_[next_]) + i, 0, 2);
      }
    }
  }

  // The blocks of the segment that rows [row, row + count) see, from the first to the last.
  bool blocks(int row, int count, int* from, int* to) const {
    const int low = row_low_[row] - begin_, high = row_high_[row + count - 1] - begin_;
    *from = low > 0 ? low / kAttentionBlock : 0;
    *to = high < kAttentionSegment ? (high + kAttentionBlock - 1) / kAttentionBlock : kSegmentBlocks;
    return *from < *to;
  }

  void attend_rows(int row, int count) {
    int from, to;
    if (!blocks(row, count, &from, &to)) return;
    const uint32_t* q = q_ + row * (dim_ / 2);
    for (int b = from; b < to; ++b) {
      float* scores = scores_ + b * kAttentionBlock;
      fetch_next();
      if (count > 16) {
        score_many<2>(q, dim_ / 2, turned_keys(b), op_.head_dim / 2, scores);
      } else {
        score_many<1>(q, dim_ / 2, turned_keys(b), op_.head_dim / 2, scores);
      }
    }
    bool part = false;
    for (int b = from; b < to; ++b) part = part || must_part(row, count, b, packed(b));
    for (int i = 0; i < count; ++i) weigh(row + i, scores_ + i * kScoreStride, from, to);
    const float* weights = scores_ + from * kAttentionBlock;
    if (part) {
      for (int b = from; b < to; ++b) add_alone(row, count, b, b == from);
    } else if (count > 16) {
      add_blocks<2>(weights, packed(from), to - from, dim_, sums_);
    } else {
      add_blocks<1>(weights, packed(from), to - from, dim_, sums_);
    }
    for (int i = 0; i < count; ++i) merge(row + i, out_ + (row + i) * dim_, sums_ + i * dim_);
  }

  void add_alone(int row, int count, int b, bool first) {
    Ahead none;
    tiles_.use(1);
    for (int i = 0; i < count; ++i) {
      pack(groups_[0].kv_head, b, row_low_[row + i], row_high_[row + i], alone_, none);
      add_block(scores_ + i * kScoreStride + b * kAttentionBlock, alone_, dim_, sums_ + i * dim_, first, none);
    }
    tiles_.use(16);
  }

  float *kt_, *scores_, *sums_, *out_;
  uint32_t *packed_, *alone_, *q_;
  int next_, share_, last_;  // positions of the next segment to be fetched, from the segment's begin
};

}  // namespace simd
}  // namespace
}  // namespace serried
