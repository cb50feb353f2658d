// The operators of a program: how each splits its work over the rank's threads. Threads split outputs, never a sum.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "program/program.hpp"

namespace serried {

constexpr int64_t kAlone = 16384;   // elements that one thread does faster than two meet
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

struct LinearOp final : Operator {
  int x, y;
  Format format;
  Linear linear;
  std::vector<Leaf> leaves;

  void run(Program& p, const Step& step) override {
    const Buffer &in = p.buffer(x), &out = p.buffer(y);
    linear.leaves = leaves.data();
    run_linear(p.k, p.pool, linear, format, in.data, in.stride, reinterpret_cast<float*>(out.data),
               out.stride / linear.nodes, step.token_count);
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
  std::vector<std::vector<float>> scratch;        // one a thread
  std::vector<std::pair<int32_t, int32_t>> groups;  // query heads that read the same KV head

  void run(Program& p, const Step& step) override {
    const Buffer &in = p.buffer(qkv), &rotated = p.buffer(q), &result = p.buffer(out);
    over_rows(p.pool, step.token_count, in.columns, [&](int64_t a, int64_t b) {
      p.k.rope_write(attention, reinterpret_cast<const float*>(in.data), in.stride, step.positions, step.slots,
                     rotated.data, rotated.stride, static_cast<int32_t>(a), static_cast<int32_t>(b));
      pad(result, a, b);
    });
    int64_t blocks = 0;
    for (int32_t s = 0; s < step.sequences; ++s) blocks += blocks_of(step, s);
    if (!blocks) return;
    // A call reads K and V of adjacent heads in longer runs the more heads it has: no more parts than threads need.
    const auto parts = std::min<int64_t>(static_cast<int64_t>(groups.size()), (p.pool.threads() + blocks - 1) / blocks);
    std::atomic<int64_t> next{0};  // which thread takes which item changes no result
    p.pool.run([&](int thread, int) { work(p, step, next, parts, scratch[static_cast<size_t>(thread)].data()); });
  }

 private:
  static void pad(const Buffer& result, int64_t a, int64_t b) {
    const size_t size = bytes_of(result.dtype), used = static_cast<size_t>(result.columns) * size;
    if (result.columns == result.stride) return;
    for (int64_t r = a; r < b; ++r)
      std::memset(result.row<char>(r) + used, 0, static_cast<size_t>(result.stride) * size - used);
  }

  static int64_t blocks_of(const Step& step, int32_t s) {
    return (step.row_starts[s + 1] - step.row_starts[s] + kRows - 1) / kRows;
  }

  // Items are (sequence, block of rows, part of the heads), taken in order by whichever thread is free: of a sequence
  // the last rows first, since they see most and would leave the other threads idle at the end.
  void work(Program& p, const Step& step, std::atomic<int64_t>& next, int64_t parts, float* mine) {
    const Buffer &rotated = p.buffer(q), &result = p.buffer(out);
    int64_t item = next.fetch_add(1, std::memory_order_relaxed), first = 0;
    for (int32_t s = 0; s < step.sequences; ++s) {
      const int32_t begin = step.row_starts[s], end = step.row_starts[s + 1];
      const int64_t items = blocks_of(step, s) * parts;
      const Sequence sequence{begin, end, step.kv_lens[s], step.blocks + step.block_starts[s]};
      while (item < first + items) {
        const auto block = static_cast<int32_t>(blocks_of(step, s) - 1 - (item - first) / parts);
        const auto [a, b] = share(static_cast<int64_t>(groups.size()), static_cast<int>((item - first) % parts),
                                  static_cast<int>(parts));
        p.k.attend(attention, sequence, step.positions, rotated.data, rotated.stride, result.data, result.stride,
                   begin + block * kRows, std::min(end, begin + (block + 1) * kRows),
                   groups[static_cast<size_t>(a)].first, groups[static_cast<size_t>(b - 1)].second, mine);
        item = next.fetch_add(1, std::memory_order_relaxed);
      }
      first += items;
    }
  }
};

}  // namespace serried
