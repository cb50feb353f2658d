// A pass of attention by tiles of AMX: up to 256 rows of one KV head (prefill). Keys are turned and values packed once
// a segment for all of them, 32 rows at a time meet them, and the next segment is fetched meanwhile.
#pragma once
#include "attention_amx_rows.hpp"

namespace serried {
namespace {
namespace simd {

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
