// Causal attention over the paged cache, one pass of up to 64 rows, a row being a token and a query head: in prefill
// many tokens of the heads that share one KV head, in decode all heads of one token, so that K and V are read once and
// in the order of memory. For a segment of 256 positions: all scores; then each row's maximum, weights and their sum;
// then the weighted sum of V; then the merge. A row's arithmetic is bounded by what it sees itself, so nothing masked
// is ever multiplied (0 * NaN) and the rows beside it leave no trace.
#pragma once
#include "attention_tiles.hpp"
#include "softcap.hpp"

namespace serried {
namespace {
namespace simd {

constexpr int kPassRows = 64;
constexpr int kSpareRows = kPassRows + 16;  // AMX scores 16 rows at a time, there or not
constexpr int kAlign = 16;                  // floats

constexpr int64_t padded_dim(int head_dim) { return (head_dim + 31) / 32 * 32; }

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
    segment_out_ = packed_ + kAttentionSegment * kPair + kSpareRows * dim_;
    out_ = segment_out_ + kPassRows * dim_;
    scores_ = out_ + kPassRows * dim_;
    if constexpr (kByTiles) {
      const int64_t first = (words<T>(op.head_dim) + 3) / 4 * 4;  // what turn_keys leaves untouched
      std::memset(kt_ + first * kAttentionBlock, 0, sizeof(float) * (dim_ - first) * kAttentionBlock);
    }
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
      if (begin_ <= low_) start_stream();
      score_segment();
      for (int r = 0; r < rows_; ++r) weigh_row(r);
      add_segment();
      for (int r = 0; r < rows_; ++r) merge_row(r);
    }
    write(out, out_stride);
  }

 private:
  static constexpr bool kByTiles = kHasTiles && kIsBf16<T>;
  static constexpr int kScoreRows = kByTiles ? 16 : kTileRows;
  static constexpr int kBlocks = kAttentionSegment / kAttentionBlock;
  static constexpr int kLocated = 2 * kAttentionSegment;

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

  // Queries as the words that are multiplied: [step][rows] for each tile of rows; for AMX, row by row or (up to 16
  // rows) [step][rows].
  void load_queries(const T* q, int64_t q_stride) {
    for (int g = 0; g < group_count_; ++g) {
      const Group& group = groups_[g];
      const int rows = rows_of(group);
      for (int i = 0, t = token_, h = 0; i < rows; ++i) {
        const T* from = q + t * q_stride + (group.head + h) * op_.head_dim;
        const int first = i / kTileRows * kTileRows, count = rows - first < kTileRows ? rows - first : kTileRows;
        if (few(group)) {
          uint32_t* to = q_ + group.row * dim_ + i;
          load_query(from, op_.head_dim / 2, to, rows);
          for (int64_t d = op_.head_dim / 2; d < dim_ / 2; ++d) to[d * rows] = 0;
        } else if constexpr (kByTiles) {
          uint32_t* to = q_ + (group.row + i) * dim_;
          std::memcpy(to, from, sizeof(T) * op_.head_dim);
          std::memset(to + op_.head_dim / 2, 0, 4 * (dim_ / 2 - op_.head_dim / 2));
        } else {
          load_query(from, steps<T>(op_.head_dim), q_ + (group.row + first) * dim_ + (i - first), count);
        }
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

  // Element offsets in the cache of the positions of the segment and, to be fetched ahead, of the next. Beyond the
  // last position that any row sees the last one stands in: its keys are masked, its values are not reached.
  void locate(int seen) {
    const int64_t slot_size = int64_t{op_.kv_heads} * op_.head_dim;
    const int rest = high_ - begin_, count = rest < kLocated ? rest : kLocated, first = from_ * kAttentionBlock;
    int block = (begin_ + first) / op_.block_size, inside = (begin_ + first) % op_.block_size;
    for (int i = first; i < count; ++i) {
      offsets_[i] = (int64_t{sequence_.blocks[block]} * op_.block_size + inside) * slot_size;
      if (++inside == op_.block_size) inside = 0, ++block;
    }
    const int end = seen < kAttentionSegment ? to_ * kAttentionBlock : kLocated;
    for (int i = count; i < end; ++i) offsets_[i] = offsets_[count - 1];
  }

  const T* keys(int kv_head) const { return static_cast<const T*>(op_.k_cache) + kv_head * op_.head_dim; }
  const T* values(int kv_head) const { return static_cast<const T*>(op_.v_cache) + kv_head * op_.head_dim; }

  int rows_of(const Group& group) const { return group.heads * tokens_; }
  bool few(const Group& group) const { return kByTiles && rows_of(group) <= 16; }

  void score_segment() {
    for (int b = from_; b < to_; ++b) {
      plan_ahead(b - from_ + distance_);
      for (int g = 0; g < group_count_; ++g) score_block(groups_[g], b, share(g));
    }
  }

  // Scores of one block for the rows of a group; tiles that see nothing of it are left out.
  void score_block(const Group& group, int b, const Ahead& ahead) {
#if SERRIED_amx
    if constexpr (kByTiles) {
      if (few(group)) return score_few(group, b, ahead);
    }
#endif
    const char* rows[kAttentionBlock];
    const T* k = keys(group.kv_head);
    for (int i = 0; i < kAttentionBlock; ++i)
      rows[i] = reinterpret_cast<const char*>(k + offsets_[b * kAttentionBlock + i]);
    turn_keys<T>(rows, op_.head_dim, kt_, ahead);
    const int first = begin_ + b * kAttentionBlock, end = group.row + rows_of(group);
    for (int row = group.row; row < end; row += kScoreRows) {
      const int count = end - row < kScoreRows ? end - row : kScoreRows;
      if (row_high_[row + count - 1] <= first || row_low_[row] >= first + kAttentionBlock) continue;
      score_rows(row, count, scores_ + row * kScoreStride + b * kAttentionBlock);
    }
  }

#if SERRIED_amx
  // Up to 16 rows: keys are not turned, and where 16 positions lie side by side not even moved.
  void score_few(const Group& group, int b, Ahead ahead) {
    const int first = begin_ + b * kAttentionBlock, rows = rows_of(group);
    const int tiles = first + 16 < high_ ? 2 : 1;
    const bool whole = op_.block_size % 16 == 0 && op_.head_dim % 32 == 0 && first + 16 * tiles <= high_;
    const T* k = keys(group.kv_head);
    const uint32_t* q = q_ + group.row * dim_;
    const char* from[2];
    int64_t stride = int64_t{op_.kv_heads} * op_.head_dim * 2;
    if (whole) {
      for (int t = 0; t < 2; ++t) from[t] = reinterpret_cast<const char*>(k + offsets_[b * kAttentionBlock + 16 * t]);
    } else {
      char* to = reinterpret_cast<char*>(kt_ + dim_ / 2 * kAttentionBlock);  // where turned keys are not
      stride = dim_ * 2, from[0] = to, from[1] = to + 16 * stride;
      for (int i = 0; i < 16 * tiles; ++i, to += stride) {
        std::memcpy(to, k + offsets_[b * kAttentionBlock + i], 2 * static_cast<size_t>(op_.head_dim));
        std::memset(to + 2 * op_.head_dim, 0, 2 * static_cast<size_t>(dim_ - op_.head_dim));
      }
    }
    alignas(64) float out[2 * 16 * 16];
    float* scores = scores_ + group.row * kScoreStride + b * kAttentionBlock;
    if (tiles == 2) {
      score_keys<2>(from, stride, q, rows, op_.head_dim / 2, out, ahead);
      turn_scores(out + 256, rows, scores + 16);
    } else {
      score_keys<1>(from, stride, q, rows, op_.head_dim / 2, out, ahead);
    }
    turn_scores(out, rows, scores);
    ahead.fetch_rest();
  }
#endif

  void score_rows(int row, int count, float* scores) {
    const uint32_t* q = q_ + row * dim_;
#if SERRIED_amx
    if constexpr (kByTiles) return score_16_rows(q, dim_, kt_, op_.head_dim / 2, scores);
#endif
    with_rows(count,
              [&](auto constant) { score_tile<T, decltype(constant)::value>(q, kt_, steps<T>(op_.head_dim), scores); });
  }

  // A row's part of the segment, [low, high) counted from its begin; false if there is none.
  bool inside(int row, int* low, int* high) const {
    *low = row_low_[row] > begin_ ? row_low_[row] - begin_ : 0;
    *high = row_high_[row] - begin_ < kAttentionSegment ? row_high_[row] - begin_ : kAttentionSegment;
    return *low < *high;
  }

  // Scores become exp(scale * score - maximum), after the soft cap if there is one; what the row does not see becomes
  // 0. Lane j sums positions j, j + kLanes, ...
  [[gnu::noinline]] void weigh_row(int row) {
    int low, high;
    if (!inside(row, &low, &high)) return;
    float* s = scores_ + row * kScoreStride;
    const int first = low / kLanes * kLanes, end = (high + kLanes - 1) / kLanes * kLanes;
    const V nothing = set(-__builtin_inff()), scale = set(op_.scale);
    const Cap cap(op_.softcap);
    V top = nothing, total{};
    for (int i = first; i < end; i += kLanes) {
      V score = load(s + i) * scale;
      if (op_.softcap > 0) score = cap.of(score);
      if (i < low || i + kLanes > high) {
        const I at = iota() + i;
        score = ((at >= low) & (at < high)) ? score : nothing;
      }
      store(s + i, score);
      top = max(top, score);
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
    const Scattered<T> all{values(group.kv_head), offsets_};
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

  // The memory of all groups in block j of the stream: the segment's keys, its values, the next segment's keys.
  void plan_ahead(int j) {
    const int count = to_ - from_;
    const bool value = j >= count && j < 2 * count;
    const int b = j < count ? from_ + j : value ? from_ + j - count : kBlocks + j - 2 * count;
    ahead_.row = 0, ahead_.byte = 0, ahead_.due = 0, ahead_.row_end = 0;
    if (b >= 2 * kBlocks || begin_ + b * kAttentionBlock >= high_) return;
    const T* base = value ? values(first_kv_head_) : keys(first_kv_head_);
    constexpr int kApart = kAttentionBlock / Ahead::kRows;
    for (int i = 0; i < kAttentionBlock; ++i)
      ahead_rows_[i % kApart * Ahead::kRows + i / kApart] =
          reinterpret_cast<const char*>(base + offsets_[b * kAttentionBlock + i]);
    ahead_.rows = ahead_rows_, ahead_.row_end = kAttentionBlock;
  }

  void fetch_block(int j) {
    plan_ahead(j);
    ahead_.fetch_rest();
  }

  // The stream's width, how far ahead it is fetched (16 KiB or a block: more would leave a short
  // sequence nothing to overlap with), and its beginning.
  void start_stream() {
    int last = groups_[0].kv_head;
    first_kv_head_ = last;
    for (int g = 1; g < group_count_; ++g) {
      first_kv_head_ = groups_[g].kv_head < first_kv_head_ ? groups_[g].kv_head : first_kv_head_;
      last = groups_[g].kv_head > last ? groups_[g].kv_head : last;
    }
    ahead_.bytes = (last + 1 - first_kv_head_) * op_.head_dim * static_cast<int64_t>(sizeof(T));
    const int64_t blocks = 16384 / (ahead_.bytes * kAttentionBlock);
    distance_ = blocks < 1 ? 1 : blocks > kBlocks ? kBlocks : static_cast<int>(blocks);
    for (int j = 0; j < distance_; ++j) fetch_block(j);
  }

  // Group g's part of it.
  Ahead share(int g) const {
    Ahead part = ahead_;
    const int steps = ahead_.row_end / Ahead::kRows;
    part.row = steps * g / group_count_ * Ahead::kRows, part.row_end = steps * (g + 1) / group_count_ * Ahead::kRows;
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
  int64_t offsets_[kLocated];
  int first_kv_head_, distance_;
  const char* ahead_rows_[kAttentionBlock];
  Ahead ahead_;
};

}  // namespace simd
}  // namespace
}  // namespace serried
