// A pass of attention by tiles of AMX: up to 16 rows for each of several KV heads, all of which are read block by block
// in the order of memory (decode).
#pragma once
#include "attention_amx_rows.hpp"

namespace serried {
namespace {
namespace simd {

constexpr int kFewRows = 16;

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

}  // namespace simd
}  // namespace
}  // namespace serried
