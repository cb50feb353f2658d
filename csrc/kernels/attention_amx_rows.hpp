// What passes of attention by tiles of AMX do alike, for a cache in bf16.
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

class TileRows : protected Rows {
 protected:
  TileRows(const Attention& op, const Sequence& sequence, Tiles& tiles)
      : Rows(op, sequence, sizeof(Bf16)), tiles_(tiles) {}

  // Packs the segment's block b, but what lies outside of [low, high).
  void pack(int kv_head, int b, int low, int high, uint32_t* to, Ahead& ahead) const {
    const int first = begin_ + b * kAttentionBlock;
    const int64_t* offsets = offsets_ + b * kAttentionBlock;
    pack_block(values<Bf16>(kv_head), offsets, low - first, high - first, op_.head_dim, to, ahead);
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

}  // namespace simd
}  // namespace
}  // namespace serried
