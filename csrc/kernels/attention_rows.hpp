// What every pass of attention does alike: which positions its rows see, where these lie in the cache, the softmax of a
// segment, the merge of segments, and the prefetch of what the pass will read next.
#pragma once
#include "attention_tiles.hpp"
#include "softcap.hpp"

namespace serried {
namespace {
namespace simd {

constexpr int kAlign = 16;  // floats
constexpr int kSegmentBlocks = kAttentionSegment / kAttentionBlock;

constexpr int64_t padded_dim(int head_dim) { return (head_dim + 31) / 32 * 32; }

// The first aligned float of scratch.
inline float* aligned(float* scratch) {
  return scratch + (64 - reinterpret_cast<uintptr_t>(scratch) % 64) % 64 / 4;
}

// The heads of a pass that share one KV head: rows [row, row + heads * tokens), token by token.
struct Group {
  int kv_head, head, heads, row;
};

class Rows {
 protected:
  static constexpr int kMost = 256;
  static constexpr int kLocated = 2 * kAttentionSegment;

  // size: bytes of an element of the cache.
  Rows(const Attention& op, const Sequence& sequence, int size) : op_(op), sequence_(sequence), size_(size) {
    dim_ = padded_dim(op.head_dim);
  }

  // What each row sees, [low, high), and the pass as a whole. Rows see later positions the later they stand in a group.
  void begin_rows(const int32_t* positions, const Group* groups, int group_count, int token, int tokens) {
    groups_ = groups, group_count_ = group_count, token_ = token, tokens_ = tokens;
    rows_ = 0, low_ = INT32_MAX, high_ = 0;
    for (int g = 0; g < group_count; ++g) {
      for (int t = token; t < token + tokens; ++t) {
        const int high = positions[t] + 1;
        const int low = op_.window > 0 && high > op_.window ? high - op_.window : 0;
        for (int h = 0; h < groups[g].heads; ++h, ++rows_) row_low_[rows_] = low, row_high_[rows_] = high;
        low_ = low < low_ ? low : low_, high_ = high > high_ ? high : high_;
      }
    }
  }
  int first_segment() const { return low_ / kAttentionSegment; }

  void begin_segment(int segment) {
    begin_ = segment * kAttentionSegment;
    from_ = low_ > begin_ ? (low_ - begin_) / kAttentionBlock : 0;
    const int seen = high_ - begin_ < kAttentionSegment ? high_ - begin_ : kAttentionSegment;
    to_ = (seen + kAttentionBlock - 1) / kAttentionBlock;
    locate(seen);
  }

  template <class T>
  const T* keys(int kv_head) const {
    return static_cast<const T*>(op_.k_cache) + kv_head * op_.head_dim;
  }
  template <class T>
  const T* values(int kv_head) const {
    return static_cast<const T*>(op_.v_cache) + kv_head * op_.head_dim;
  }
  int rows_of(const Group& group) const { return group.heads * tokens_; }

  // A row's part of the segment, [low, high) counted from its begin; false if there is none.
  bool inside(int row, int* low, int* high) const {
    *low = row_low_[row] > begin_ ? row_low_[row] - begin_ : 0;
    *high = row_high_[row] - begin_ < kAttentionSegment ? row_high_[row] - begin_ : kAttentionSegment;
    return *low < *high;
  }

  // The row's scores of the segment become exp(scale * score - maximum), after the soft cap if there is one; what the
  // row does not see of the blocks that it does see becomes 0. Lane j sums positions j, j + kLanes, ...
  [[gnu::noinline]] void weigh_row(int row, float* s) {
    int low, high;
    if (!inside(row, &low, &high)) return;
    const V most = set(scale_row(row, s, low, high));
    V total{};
    for (int i = block_begin(low), end = block_end(high); i < end; i += kLanes) {
      const V p = exp(load(s + i) - most);
      store(s + i, p);
      total = total + p;
    }
    segment_sum_[row] = sum(total);
  }

  // The blocks that a part of a segment touches begin and end here.
  static int block_begin(int low) { return low / kAttentionBlock * kAttentionBlock; }
  static int block_end(int high) { return (high + kAttentionBlock - 1) / kAttentionBlock * kAttentionBlock; }

  // Scales scores, and caps them; -inf where nothing is seen. Returns the maximum, and keeps it.
  [[gnu::always_inline]] float scale_row(int row, float* s, int low, int high) {
    const V nothing = set(-__builtin_inff()), scale = set(op_.scale);
    const Cap cap(op_.softcap);
    const auto one = [&](int i) __attribute__((always_inline)) {
      V score = load(s + i) * scale;
      if (op_.softcap > 0) score = cap.of(score);
      if (i < low || i + kLanes > high) {
        const I at = iota() + i;
        score = ((at >= low) & (at < high)) ? score : nothing;
      }
      store(s + i, score);
      return score;
    };
    V top = nothing, other = nothing;
    for (int i = block_begin(low), end = block_end(high); i < end; i += 2 * kLanes)
      top = max(top, one(i)), other = max(other, one(i + kLanes));
    return segment_max_[row] = largest(max(top, other));
  }

  // The first segment that a row sees is taken as it is; each later one is rescaled to the common maximum and added.
  // part(i): columns [i, i + kLanes) of the segment's sum.
  template <class F>
  void merge_row(int row, float* total, F part) {
    int low, high;
    if (!inside(row, &low, &high)) return;
    if (row_low_[row] >= begin_) {
      for (int64_t i = 0; i < dim_; i += kLanes) store(total + i, part(i));
      max_[row] = segment_max_[row], sum_[row] = segment_sum_[row];
      return;
    }
    const float old = max_[row], top = segment_max_[row] > old ? segment_max_[row] : old;
    const float a = exp_one(old - top), b = exp_one(segment_max_[row] - top);
    for (int64_t i = 0; i < dim_; i += kLanes) store(total + i, fma(part(i), set(b), load(total + i) * set(a)));
    max_[row] = top, sum_[row] = sum_[row] * a + segment_sum_[row] * b;
  }

  // totals: [rows][dim_], columns in the order of Pair.
  template <class T>
  void write(const float* totals, T* out, int64_t out_stride) const {
    int row = 0;
    for (int g = 0; g < group_count_; ++g) {
      for (int t = token_; t < token_ + tokens_; ++t) {
        T* to = out + t * out_stride + groups_[g].head * op_.head_dim;
        for (int h = 0; h < groups_[g].heads; ++h, ++row, to += op_.head_dim) write_row(row, totals + row * dim_, to);
      }
    }
  }

  // The memory of all groups in block j of the stream: the segment's keys, its values, the next segment's keys, or,
  // where there is none, the next sequence's.
  void plan_ahead(int j) {
    const int count = to_ - from_;
    const bool value = j >= count && j < 2 * count;
    const int b = j < count ? from_ + j : value ? from_ + j - count : kSegmentBlocks + j - 2 * count;
    ahead_.row = 0, ahead_.byte = 0, ahead_.due = 0, ahead_.row_end = 0;
    if (j >= 2 * count && begin_ + kAttentionSegment >= high_) return plan_next(j - 2 * count);
    if (b >= 2 * kSegmentBlocks || begin_ + b * kAttentionBlock >= high_) return;
    plan_rows(value ? op_.v_cache : op_.k_cache, [&](int i) { return offsets_[b * kAttentionBlock + i]; });
  }

  void fetch_block(int j) {
    plan_ahead(j);
    ahead_.fetch_rest();
  }

  // The stream's width, how far ahead it is fetched (16 KiB or a block: more would leave a short
  // sequence nothing to overlap with), and its beginning, unless that was fetched beside the sequence before.
  void start_stream() {
    int last = groups_[0].kv_head;
    first_kv_head_ = last;
    for (int g = 1; g < group_count_; ++g) {
      first_kv_head_ = groups_[g].kv_head < first_kv_head_ ? groups_[g].kv_head : first_kv_head_;
      last = groups_[g].kv_head > last ? groups_[g].kv_head : last;
    }
    ahead_.bytes = (last + 1 - first_kv_head_) * op_.head_dim * int64_t{size_};
    const int64_t blocks = 16384 / (ahead_.bytes * kAttentionBlock);
    distance_ = blocks < 1 ? 1 : blocks > kSegmentBlocks ? kSegmentBlocks : static_cast<int>(blocks);
    for (int j = 0; j < distance_ && !sequence_.begun; ++j) fetch_block(j);
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
  const int size_;
  int64_t dim_;  // of a row in scratch
  const Group* groups_;
  int group_count_, token_, tokens_, rows_, low_, high_;
  int begin_, from_, to_;  // the segment's first position, and its blocks that any row sees
  int row_low_[kMost], row_high_[kMost];
  float segment_sum_[kMost];
  int64_t offsets_[kLocated];
  int distance_;
  Ahead ahead_;

 private:
  // Element offsets in the cache of the positions of the segment and, to be fetched ahead, of the next. Beyond the
  // last position that any row sees the last one stands in: its keys are masked, its values are not reached.
  void locate(int seen) {
    const int64_t slot_size = this->slot_size();
    const int rest = high_ - begin_, count = rest < kLocated ? rest : kLocated, first = from_ * kAttentionBlock;
    int block = (begin_ + first) / op_.block_size, inside = (begin_ + first) % op_.block_size;
    for (int i = first; i < count; ++i) {
      offsets_[i] = (int64_t{sequence_.blocks[block]} * op_.block_size + inside) * slot_size;
      if (++inside == op_.block_size) inside = 0, ++block;
    }
    const int end = seen < kAttentionSegment ? to_ * kAttentionBlock : kLocated;
    for (int i = count; i < end; ++i) offsets_[i] = offsets_[count - 1];
  }

  int64_t slot_size() const { return int64_t{op_.kv_heads} * op_.head_dim; }

  // offset(i): of position i of the block to fetch, in elements.
  template <class F>
  void plan_rows(const void* cache, F offset) {
    const char* base = static_cast<const char*>(cache) + int64_t{first_kv_head_} * op_.head_dim * size_;
    constexpr int kApart = kAttentionBlock / Ahead::kRows;
    for (int i = 0; i < kAttentionBlock; ++i)
      ahead_rows_[i % kApart * Ahead::kRows + i / kApart] = base + offset(i) * size_;
    ahead_.rows = ahead_rows_, ahead_.row_end = kAttentionBlock;
  }

  // Block j of the keys of the sequence after this one.
  void plan_next(int j) {
    if (sequence_.next == nullptr) return;
    const Sequence& next = *sequence_.next;
    const int seen = next.kv_len - (next.row_end - next.row_begin) + 1;  // by its first row
    const int low = op_.window > 0 && seen > op_.window ? seen - op_.window : 0;
    const int first = (low / kAttentionBlock + j) * kAttentionBlock, last = next.kv_len - 1;
    if (first > last) return;
    plan_rows(op_.k_cache, [&](int i) {
      const int at = first + i < last ? first + i : last;
      return (int64_t{next.blocks[at / op_.block_size]} * op_.block_size + at % op_.block_size) * slot_size();
    });
  }

  template <class T>
  void write_row(int row, const float* total, T* to) const {
    const V sum = set(sum_[row]);
    for (int i = 0; i < op_.head_dim; i += kPair) {
      const int n = op_.head_dim - i < kPair ? op_.head_dim - i : kPair;
      store_pair(to + i, {load(total + i) / sum, load(total + i + kLanes) / sum}, n);
    }
  }

  float segment_max_[kMost], max_[kMost], sum_[kMost];
  int first_kv_head_;
  const char* ahead_rows_[kAttentionBlock];
};

}  // namespace simd
}  // namespace
}  // namespace serried
