// Causal attention over the paged cache, one pass of up to 64 rows, a row being a token and a query head: in prefill
// many tokens of the heads that share one KV head, in decode all heads of one token, so that K and V are read once and
// in the order of memory. For a segment of 256 positions: all scores; then each row's maximum, weights and their sum;
// then the weighted sum of V; then the merge. A row's arithmetic is bounded by what it sees itself, so nothing masked
// is ever multiplied (0 * NaN) and the rows beside it leave no trace. By tiles of AMX: attention_amx_rows.hpp.
#pragma once
#include "attention_rows.hpp"

namespace serried {
namespace {
namespace simd {

constexpr int kPassRows = 64;

template <class T>
class Pass : Rows {
 public:
  static int64_t scratch(const Attention& op) {
    const int64_t dim = padded_dim(op.head_dim);
    return kAlign + dim * kAttentionBlock + kAttentionSegment * kPair + kPassRows * (3 * dim + kScoreStride);
  }

  Pass(const Attention& op, const Sequence& sequence, float* scratch) : Rows(op, sequence, sizeof(T)) {
    kt_ = aligned(scratch);
    packed_ = kt_ + dim_ * kAttentionBlock;
    q_ = reinterpret_cast<uint32_t*>(packed_ + kAttentionSegment * kPair);
    segment_out_ = packed_ + kAttentionSegment * kPair + kPassRows * dim_;
    out_ = segment_out_ + kPassRows * dim_;
    scores_ = out_ + kPassRows * dim_;
  }

  void run(const int32_t* positions, const T* q, int64_t q_stride, T* out, int64_t out_stride, const Group* groups,
           int group_count, int token, int tokens) {
    begin_rows(positions, groups, group_count, token, tokens);
    load_queries(q, q_stride);
    for (int s = first_segment(); s * kAttentionSegment < high_; ++s) {
      begin_segment(s);
      if (begin_ <= low_) start_stream();
      score_segment();
      for (int r = 0; r < rows_; ++r) weigh_row(r, scores_ + r * kScoreStride);
      add_segment();
      for (int r = 0; r < rows_; ++r)
        merge_row(r, out_ + r * dim_, [part = segment_out_ + r * dim_](int64_t i) { return load(part + i); });
    }
    write(out_, out, out_stride);
  }

 private:
  // Queries as the words that are multiplied: [step][rows] for each tile of rows.
  void load_queries(const T* q, int64_t q_stride) {
    for (int g = 0; g < group_count_; ++g) {
      const Group& group = groups_[g];
      const int rows = rows_of(group);
      for (int i = 0, t = token_, h = 0; i < rows; ++i) {
        const T* from = q + t * q_stride + (group.head + h) * op_.head_dim;
        const int first = i / kTileRows * kTileRows, count = rows - first < kTileRows ? rows - first : kTileRows;
        load_query(from, steps<T>(op_.head_dim), q_ + (group.row + first) * dim_ + (i - first), count);
        if (++h == group.heads) h = 0, ++t;
      }
    }
  }

  static void load_query(const T* from, int step_count, uint32_t* to, int count) {
    for (int i = 0; i < step_count; ++i, to += count) {
      if constexpr (kIsBf16<T> && !kPairSteps<T>) {
        *to = uint32_t{from[i].bits} << 16;
      } else {
        std::memcpy(to, reinterpret_cast<const char*>(from) + 4 * i, 4);
      }
    }
  }

  void score_segment() {
    for (int b = from_; b < to_; ++b) {
      plan_ahead(b - from_ + distance_);
      for (int g = 0; g < group_count_; ++g) score_block(groups_[g], b, share(g));
    }
  }

  // Scores of one block for the rows of a group; tiles that see nothing of it are left out.
  void score_block(const Group& group, int b, const Ahead& ahead) {
    const char* rows[kAttentionBlock];
    const T* k = keys<T>(group.kv_head);
    for (int i = 0; i < kAttentionBlock; ++i)
      rows[i] = reinterpret_cast<const char*>(k + offsets_[b * kAttentionBlock + i]);
    turn_keys<T>(rows, op_.head_dim, kt_, ahead);
    const int first = begin_ + b * kAttentionBlock, end = group.row + rows_of(group);
    for (int row = group.row; row < end; row += kTileRows) {
      const int count = end - row < kTileRows ? end - row : kTileRows;
      if (row_high_[row + count - 1] <= first || row_low_[row] >= first + kAttentionBlock) continue;
      const uint32_t* q = q_ + row * dim_;
      float* scores = scores_ + row * kScoreStride + b * kAttentionBlock;
      with_rows(count, [&](auto constant) {
        score_tile<T, decltype(constant)::value>(q, kt_, steps<T>(op_.head_dim), scores);
      });
    }
  }

  // Many rows of one group take the segment as a whole; else groups take turns block by block, in the memory's order.
  void add_segment() {
    std::memset(segment_out_, 0, sizeof(float) * static_cast<size_t>(rows_ * dim_));
    const int count = to_ - from_;
    if (group_count_ == 1 && rows_ > kTileRows) {
      for (int j = count; j < 2 * count; ++j) fetch_block(j + distance_);
      return add_range(groups_[0], from_ * kAttentionBlock, to_ * kAttentionBlock, nullptr);
    }
    for (int b = from_; b < to_; ++b) {
      plan_ahead(count + b - from_ + distance_);
      for (int g = 0; g < group_count_; ++g) {
        Ahead ahead = share(g);
        add_range(groups_[g], b * kAttentionBlock, (b + 1) * kAttentionBlock, &ahead);
        ahead.fetch_rest();
      }
    }
  }

  // Several tiles of rows: the values are packed for them, kPair columns at a time (32 KiB for the segment).
  void add_range(const Group& group, int from, int to, Ahead* ahead) {
    const Scattered<T> all{values<T>(group.kv_head), offsets_};
    if (rows_of(group) <= kTileRows) return add_tile(all, group.row, rows_of(group), from, to, 0, ahead);
    const int low = low_ - begin_ > from ? low_ - begin_ : from, high = high_ - begin_ < to ? high_ - begin_ : to;
    for (int c = 0; c < op_.head_dim; c += kPair) {
      pack_values(all, c, op_.head_dim - c, low, high, packed_);
      for (int row = group.row, end = row + rows_of(group); row < end; row += kTileRows)
        add_tile(Packed{packed_}, row, end - row < kTileRows ? end - row : kTileRows, from, to, c, nullptr);
    }
  }

  // Positions that all rows of the tile see go together; before and after them each row takes what it sees alone.
  template <class Source>
  void add_tile(Source values, int row, int count, int from, int to, int column, Ahead* ahead) {
    int lows[kTileRows], highs[kTileRows], low = from, high = to;
    for (int r = 0; r < count; ++r) {
      inside(row + r, &lows[r], &highs[r]);
      lows[r] = lows[r] > from ? lows[r] : from, highs[r] = highs[r] < to ? highs[r] : to;
      low = lows[r] > low ? lows[r] : low, high = highs[r] < high ? highs[r] : high;
    }
    if (low >= high) low = high = to;
    for (int r = 0; r < count; ++r)
      add_rows<1>(values, row + r, lows[r], highs[r] < low ? highs[r] : low, column, nullptr);
    with_rows(count,
              [&](auto constant) { add_rows<decltype(constant)::value>(values, row, low, high, column, ahead); });
    for (int r = 0; r < count; ++r)
      add_rows<1>(values, row + r, high > lows[r] ? high : lows[r], highs[r], column, nullptr);
  }

  template <int R, class Source>
  void add_rows(Source values, int row, int from, int to, int column, Ahead* ahead) {
    if (from >= to) return;
    value_rows<R>(values, op_.head_dim, scores_ + row * kScoreStride, from, to, segment_out_ + row * dim_ + column,
                  dim_, ahead);
  }

  float *kt_, *packed_, *segment_out_, *out_, *scores_;
  uint32_t* q_;
};

}  // namespace simd
}  // namespace
}  // namespace serried
