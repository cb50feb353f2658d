// The operators of a program: how each splits its work over the rank's threads. Threads split outputs, never a sum.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "program/program.hpp"

namespace serried {

constexpr int64_t kAlone = 4096;    // elements that one thread does faster than two meet
constexpr int32_t kTokenBlock = 64;  // rows of a linear's work item where there are more

inline std::pair<int64_t, int64_t> share(int64_t count, int thread, int threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

// f(begin, end) over rows, on one thread where there is little to do.
template <class F>
void over_rows(Pool& pool, int64_t rows, int64_t columns, F&& f) {
  if (rows * columns <= kAlone || rows == 1) {
    if (rows) f(int64_t{0}, rows);
    return;
  }
  pool.run([&](int thread, int threads) {
    const auto [begin, end] = share(rows, thread, threads);
    if (begin < end) f(begin, end);
  });
}

// A linear over all its tiles and `rows` rows: work items are (tile, block of rows), tile by tile.
inline void run_linear(const Kernels& k, Pool& pool, const Linear& linear, Format format, const void* x,
                       int64_t x_stride, float* y, int64_t y_stride, int32_t rows) {
  const LinearFn kernel = k.linear[static_cast<int>(format)];
  pool.run([&](int thread, int threads) {
    const int32_t blocks = linear.tiles >= 8 * threads ? 1 : (rows + kTokenBlock - 1) / kTokenBlock;
    const int32_t block = blocks == 1 ? rows : kTokenBlock;
    auto [item, end] = share(int64_t{linear.tiles} * blocks, thread, threads);
    while (item < end) {
      const auto tile = static_cast<int32_t>(item / blocks), first = static_cast<int32_t>(item % blocks);
      const bool whole = first == 0 && item + blocks <= end;
      const int32_t tiles = whole ? static_cast<int32_t>((end - item) / blocks) : 1;
      const int64_t count = whole ? blocks : std::min<int64_t>(blocks - first, end - item);
      kernel(linear, x, x_stride, y, y_stride, first * block,
             std::min<int32_t>(rows, static_cast<int32_t>(first + count) * block), tile, tile + tiles);
      item += whole ? int64_t{tiles} * blocks : count;
    }
  });
}

// What takes the rows of a linear, and may ask for them itself: when and where it needs them.
class Taker {
 public:
  virtual ~Taker() = default;
  virtual bool asks_for_rows(const Program& p, const Step& step) const = 0;
};

struct LinearOp final : Operator {
  int x, y;
  Format format;
  Linear linear;
  std::vector<Leaf> leaves;
  const Taker* taker = nullptr;

  void run(Program& p, const Step& step) override {
    const Buffer& out = p.buffer(y);
    if (taker && taker->asks_for_rows(p, step)) return;
    rows(p, 0, step.token_count, out.row<float>(0), out.stride / linear.nodes);
  }

  // Rows [begin, end), the first of them at `to`; stride: of a node.
  void rows(Program& p, int64_t begin, int64_t end, float* to, int64_t stride) {
    const Buffer& in = p.buffer(x);
    const auto count = static_cast<int32_t>(end - begin);
    linear.leaves = leaves.data();
    if (count) run_linear(p.k, p.pool, linear, format, in.row<char>(begin), in.stride, to, stride, count);
  }
};

struct LogitsOp final : Operator {
  int x;
  float softcap;  // 0: none
  Format format;
  Linear linear;
  Leaf leaf;

  void run(Program& p, const Step& step) override {
    if (!step.logit_count) return;
    const Buffer& in = p.buffer(x);
    linear.leaves = &leaf;
    const int64_t stride = int64_t{linear.tiles} * kTile;
    run_linear(p.k, p.pool, linear, format, in.data, in.stride, step.logits, stride, step.logit_count);
    if (softcap <= 0) return;
    over_rows(p.pool, step.logit_count * int64_t{linear.tiles}, kTile, [&](int64_t a, int64_t b) {
      p.k.softcap(softcap, step.logits + a * kTile, (b - a) * kTile);
    });
  }
};

struct NormOp final : Operator {
  int x, y;
  const float* weight;
  float eps;

  void run(Program& p, const Step& step) override {
    const Buffer &in = p.buffer(x), &out = p.buffer(y);
    over_rows(p.pool, step.token_count, in.columns, [&](int64_t a, int64_t b) {
      p.k.norm(in.row<float>(a), in.stride, weight, eps, in.columns, out.row<char>(a), out.dtype, out.stride, b - a);
    });
  }
};

// residual += norm(x), then the norm of the residual: what follows the reduction where a layer has norms on both sides.
struct NormAddNormOp final : Operator {
  int x, residual, y;
  const float *inner, *weight;
  float eps;

  void run(Program& p, const Step& step) override {
    const Buffer &in = p.buffer(x), &sum = p.buffer(residual), &out = p.buffer(y);
    over_rows(p.pool, step.token_count, in.columns, [&](int64_t a, int64_t b) {
      p.k.norm_add_norm(in.row<float>(a), in.stride, inner, sum.row<float>(a), sum.stride, weight, eps, in.columns,
                        out.row<char>(a), out.dtype, out.stride, b - a);
    });
  }
};

struct GatedOp final : Operator {
  int x, y;
  Activation kind;

  void run(Program& p, const Step& step) override {
    const Buffer &in = p.buffer(x), &out = p.buffer(y);
    over_rows(p.pool, step.token_count, out.columns, [&](int64_t a, int64_t b) {
      const float* gate = in.row<float>(a);
      p.k.gated(kind, gate, gate + out.columns, in.stride, out.row<char>(a), out.dtype, out.columns, out.stride, b - a);
    });
  }
};

struct ActivateOp final : Operator {
  int x, y;
  Activation kind;

  void run(Program& p, const Step& step) override {
    const Buffer &in = p.buffer(x), &out = p.buffer(y);
    over_rows(p.pool, step.token_count, in.stride, [&](int64_t a, int64_t b) {
      std::memcpy(out.row<float>(a), in.row<float>(a), static_cast<size_t>((b - a) * in.stride) * sizeof(float));
      p.k.activate(kind, out.row<float>(a), (b - a) * in.stride);
    });
  }
};

struct ColumnsOp final : Operator {
  int x, y;
  int64_t start;

  void run(Program& p, const Step& step) override {
    const Buffer &in = p.buffer(x), &out = p.buffer(y);
    const int32_t rows = in.logit_rows ? step.logit_count : step.token_count;
    const size_t skipped = static_cast<size_t>(start) * bytes_of(in.dtype);
    over_rows(p.pool, rows, out.columns, [&](int64_t a, int64_t b) {
      p.k.round(in.row<char>(a) + skipped, in.dtype, in.stride, out.row<char>(a), out.dtype, out.columns, out.stride,
                b - a);
    });
  }
};

struct SelectRowsOp final : Operator {
  int x, y;

  void run(Program& p, const Step& step) override {
    const Buffer &in = p.buffer(x), &out = p.buffer(y);
    const auto bytes = static_cast<size_t>(row_bytes(in.dtype, in.stride));
    for (int64_t r = 0; r < step.logit_count; ++r)
      std::memcpy(out.row<char>(r), in.row<char>(step.logit_rows[r]), bytes);
  }
};

struct AttentionOp final : Operator {
  static constexpr int32_t kRows = 128;  // rows of a work item: they read K and V once
  int qkv, q, out;
  Attention attention;
  std::vector<std::vector<float>> scratch;  // one a thread
  std::vector<Heads> groups;                // query heads that read the same KV head, and that one
  bool ascending;                           // each KV head is read by one group, in order

  // Where each sequence is one block of rows, whoever attends writes K and V too: no thread waits for another, and what
  // was written is near. A longer one reads K and V from the blocks of rows before; those are all written first.
  void run(Program& p, const Step& step) override {
    const Buffer &in = p.buffer(qkv), &result = p.buffer(out);
    int64_t blocks = 0;
    bool single = ascending;
    for (int32_t s = 0; s < step.sequences; ++s) blocks += blocks_of(step, s), single &= blocks_of(step, s) <= 1;
    if (!blocks) return;
    if (!single) {
      over_rows(p.pool, step.token_count, in.columns, [&](int64_t a, int64_t b) {
        const Heads all{0, attention.query_heads, 0, attention.kv_heads};
        write(p, step, static_cast<int32_t>(a), static_cast<int32_t>(b), all);
        pad(result, a, b);
      });
    }
    // A call reads K and V of adjacent heads in longer runs the more heads it has: no more parts than threads need.
    const auto parts = std::min<int64_t>(static_cast<int64_t>(groups.size()), (p.pool.threads() + blocks - 1) / blocks);
    std::atomic<int64_t> next{0};  // which thread takes which item changes no result
    p.pool.run([&](int thread, int) {
      work(p, step, next, blocks * parts, parts, single, scratch[static_cast<size_t>(thread)].data());
    });
  }

 private:
  void write(Program& p, const Step& step, int32_t begin, int32_t end, const Heads& heads) {
    const Buffer &in = p.buffer(qkv), &rotated = p.buffer(q);
    p.k.rope_write(attention, reinterpret_cast<const float*>(in.data), in.stride, step.positions, step.slots,
                   rotated.data, rotated.stride, begin, end, heads);
  }

  static void pad(const Buffer& result, int64_t a, int64_t b) {
    const size_t size = bytes_of(result.dtype), used = static_cast<size_t>(result.columns) * size;
    if (result.columns == result.stride) return;
    for (int64_t r = a; r < b; ++r)
      std::memset(result.row<char>(r) + used, 0, static_cast<size_t>(result.stride) * size - used);
  }

  static int64_t blocks_of(const Step& step, int32_t s) {
    return (step.row_starts[s + 1] - step.row_starts[s] + kRows - 1) / kRows;
  }

  // A work item: a block of a sequence's rows, for a part of the heads.
  struct Item {
    Sequence sequence;
    int32_t begin, end;  // rows
    int64_t part;
  };

  // Items in order: of a sequence the last rows first, since they see most and would leave the other threads idle at
  // the end. Asked for ascending numbers only.
  class Items {
   public:
    Items(const Step& step, int64_t parts) : step_(step), parts_(parts) {}

    bool find(int64_t number, Item& item) {
      while (s_ < step_.sequences && number >= first_ + blocks_of(step_, s_) * parts_)
        first_ += blocks_of(step_, s_++) * parts_;
      if (s_ == step_.sequences) return false;
      const int32_t begin = step_.row_starts[s_], end = step_.row_starts[s_ + 1];
      const int64_t block = blocks_of(step_, s_) - 1 - (number - first_) / parts_;
      item.sequence = {begin, end, step_.kv_lens[s_], step_.blocks + step_.block_starts[s_], nullptr, false};
      item.part = (number - first_) % parts_;
      item.begin = static_cast<int32_t>(begin + block * kRows), item.end = std::min(end, item.begin + kRows);
      return true;
    }

   private:
    const Step& step_;
    const int64_t parts_;
    int32_t s_ = 0;
    int64_t first_ = 0;  // of sequence s_
  };

  // Each thread takes the next item that is left; where items are single sequences and others are left for the other
  // threads, one ahead, so that the next one's K is on its way while this one ends.
  void work(Program& p, const Step& step, std::atomic<int64_t>& next, int64_t count, int64_t parts, bool single,
            float* mine) {
    Items items(step, parts);
    Item item, then;
    const auto take = [&](Item& to) { return items.find(next.fetch_add(1, std::memory_order_relaxed), to); };
    for (bool some = take(item); some;) {
      const bool ahead = single && count - next.load(std::memory_order_relaxed) >= p.pool.threads();
      if (ahead) some = take(then);
      const bool follows = ahead && some && then.part == item.part;
      item.sequence.next = follows ? &then.sequence : nullptr;
      attend(p, step, item, parts, single, mine);
      if (ahead) item = then, item.sequence.begun = follows;
      else some = take(item);
    }
  }

  void attend(Program& p, const Step& step, const Item& item, int64_t parts, bool writes, float* mine) {
    const Buffer &rotated = p.buffer(q), &result = p.buffer(out);
    const auto [a, b] = share(static_cast<int64_t>(groups.size()), static_cast<int>(item.part), static_cast<int>(parts));
    const Heads &first = groups[static_cast<size_t>(a)], &last = groups[static_cast<size_t>(b - 1)];
    if (writes) {
      write(p, step, item.begin, item.end, {first.query_begin, last.query_end, first.kv_begin, last.kv_end});
      if (item.part == 0) pad(result, item.begin, item.end);
    }
    p.k.attend(attention, item.sequence, step.positions, rotated.data, rotated.stride, result.data, result.stride,
               item.begin, item.end, first.query_begin, last.query_end, mine);
  }
};

}  // namespace serried
