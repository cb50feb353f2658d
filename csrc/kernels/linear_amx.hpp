// bf16 linears by AMX. A strip is up to 32 tokens (two blocks of 16), a step is 32 k, a pass is one leaf (or a group of
// its inputs) for a strip and half a tile of weights: per step two tiles of x times two of weights (16 outputs each)
// into four accumulators, tmm0 to tmm3. The weights' layout is what tdpbf16ps wants: 16 pairs of k, 256 bytes apart.
// Up to 16 tokens are one block: one tile of x times the whole tile of weights. Loops, from the outside:
//   chunk     as many strips as keep x in the L2 cache, copied into tiles of 1 KB: rows that lie 2 KB apart, as they
//             do in x, share two sets of the L1 cache
//     tile    64 outputs
//       pair  of strips, or one: what shares the weights of a group while they are in L1
//         leaf, group, half of the tile, strip
//
// The multiplier should not wait for the memory behind it; what it hides, and how:
//   Sums. An accumulator is stored just before the next pass zeroes it. With several stacks it is folded during the
//   pass after that, once it has left the store buffer, piece by piece among the multiplications.
//   Weights. Prefetch to L2 runs ahead at the speed of the walk, four pages side by side: the processor's own
//   prefetcher follows a stream within its page only, and one stream does not fill the memory's pipe (15 % slower).
//   What moves from L2 to L1 takes the same buffers, so groups are short: the weights, and x, are used again in L1.
//   Outputs. What no cache keeps for the next operator is written past them (reading lines only to overwrite them
//   costs a quarter of a prompt's time).
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "linear_amx_pass.hpp"

namespace serried {
namespace {
namespace linear_detail {
namespace amx {

constexpr int32_t kShort = 128;   // inputs of a leaf that is not worth a group of its own
constexpr int64_t kLead = 32768;  // bytes from the walk to the prefetch

template <int kBlocks>
struct Walk {
  using K = Kernel<kBlocks>;

  const Linear& linear;
  const char* x;
  const int64_t x_stride;  // bytes
  float* y;
  const int64_t y_stride;
  const int32_t token_begin, token_end, tile_begin, tile_end;
  const int64_t strip_bytes;  // of copied x
  bool stream;
  int32_t rows, chunk_begin, chunk_end;  // rows: tokens of a block
  const char* copy;                      // of the chunk's x in tiles, or null
  K kernel;                              // large: its stacks are not cleared

  Walk(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride, int32_t token_begin,
       int32_t token_end, int32_t tile_begin, int32_t tile_end)
      : linear(linear), x(static_cast<const char*>(x)), x_stride(x_stride * 2), y(y), y_stride(y_stride),
        token_begin(token_begin), token_end(token_end), tile_begin(tile_begin), tile_end(tile_end),
        strip_bytes(int64_t{kRows * kBlocks} * linear.inputs * 2), stream(may_stream()) {}

  void run() {
    const int32_t count = token_end - token_begin, most = kRows * kBlocks;
    const int32_t strips = (count + most - 1) / most;
    kernel.tokens = even_rows(count, most);
    rows = (kernel.tokens + kBlocks - 1) / kBlocks;
    kernel.second = kernel.tokens - rows;
    kernel.pending = {kernel.stack[0][0], K::kSlotStride};  // nothing of worth is stored there at first
    const int32_t chunk = even_rows(strips, static_cast<int32_t>(std::max<int64_t>(1, kChunkBytes / strip_bytes)));
    configure(rows);
    for (chunk_begin = 0; chunk_begin < strips; chunk_begin = chunk_end) {
      chunk_end = std::min(strips, chunk_begin + chunk);
      run_chunk();
    }
    kernel.flush();
    release();
    if (stream) _mm_sfence();
  }

 private:
  int32_t first_token(int32_t strip) const {
    return std::min(token_begin + strip * kernel.tokens, token_end - kernel.tokens);
  }
  const char* tile_data(int32_t tile) const {
    return static_cast<const char*>(linear.weight) + int64_t{tile} * linear.inputs * kTile * 2;
  }
  bool may_stream() const {
    const int64_t bytes = int64_t{token_end - token_begin} * linear.nodes * (tile_end - tile_begin) * kTile * 4;
    return bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(y) % 64 == 0 && y_stride % 16 == 0;
  }

  void run_chunk() {
    const int32_t strips = chunk_end - chunk_begin;
    prepare_inputs();
    kernel.ahead_from = kernel.ahead = tile_data(tile_begin) + kLead;
    // A step's weights are 64 lines; the strips of a chunk share those of the next tile.
    const int32_t lines = kBlocks == 1 ? 16 : strips == 1 ? 8 : strips == 2 ? 4 : strips <= 4 ? 2 : 1;
    const bool pairs = kBlocks == 2 && (strips <= 4 || linear.inputs / linear.leaf_count <= kShort);
    for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
      kernel.ahead_end = tile_data(strips == 1 ? tile_end : std::min(tile + 2, tile_end));
      const int32_t now = tile == tile_begin ? std::max(lines, 8) : lines;
      for (int32_t strip = chunk_begin; strip < chunk_end; strip += pairs ? 2 : 1)
        run_leaves(tile, strip, std::min(pairs ? 2 : 1, chunk_end - strip), now);
    }
  }

  // x as it is, or, where that pays, copied.
  void prepare_inputs() {
    thread_local Scratch scratch;
    const int32_t strips = chunk_end - chunk_begin;
    copy = nullptr;
    char* to = tile_end - tile_begin < 4 ? nullptr : scratch.get(static_cast<size_t>(strip_bytes * strips));
    kernel.x_stride = to ? 64 : x_stride;
    kernel.x_block = to ? kXTile : kernel.second * x_stride;
    kernel.x_step = to ? kXTile * kBlocks : 64;
    if (!to) return;
    copy = to;
    for (int32_t strip = chunk_begin; strip < chunk_end; ++strip, to += strip_bytes) {
      for (int32_t m = 0; m < rows; ++m) {
        for (int32_t block = 0; block < kBlocks; ++block)
          copy_row(to + block * kXTile + m * 64, x + (first_token(strip) + block * kernel.second + m) * x_stride);
      }
    }
  }
  void copy_row(char* to, const char* from) const {
    for (int32_t k = 0; k < linear.inputs; k += kStepInputs, from += 64, to += kXTile * kBlocks)
      _mm512_store_si512(to, _mm512_loadu_si512(from));
  }
  const char* inputs(int32_t strip, int32_t k) const {
    if (copy) return copy + (strip - chunk_begin) * strip_bytes + int64_t{k / kStepInputs} * kXTile * kBlocks;
    return x + first_token(strip) * x_stride + int64_t{k} * 2;
  }

  // One tile for `count` strips. The second half of a tile takes them backwards: the last one's x is still near.
  void run_leaves(int32_t tile, int32_t strip, int32_t count, int32_t lines) {
    const int32_t group = kBlocks == 1 ? linear.inputs : chunk_end - chunk_begin > 1 ? 2 * kShort : kShort;
    Position at;
    for (; at.leaf < linear.leaf_count; ++at.leaf) {
      const Leaf& leaf = linear.leaves[at.leaf];
      const int32_t stop = leaf_stop(leaf);
      for (at.k = leaf.start; at.k < stop;) {
        const int32_t end = std::min(stop, at.k + group);
        for (int32_t half = 0; half < K::kHalves; ++half) {
          for (int32_t i = 0; i < count; ++i)
            run_pass(at, end, tile, half, strip, half ? count - 1 - i : i, lines);
        }
        at.k = end;
      }
      at.depth = leaf.ends_node ? 0 : at.depth - leaf.pops + 1;
      at.node += leaf.ends_node;
    }
  }

  void run_pass(const Position& at, int32_t end, int32_t tile, int32_t half, int32_t first, int32_t index,
                int32_t lines) {
    const Leaf& leaf = linear.leaves[at.leaf];
    const bool ends_leaf = end == leaf_stop(leaf), ends_node = ends_leaf && leaf.ends_node;
    const int64_t output = int64_t{tile} * kTile + half * (kTile / K::kHalves);
    const int64_t row = int64_t{first_token(first + index)} * linear.nodes + at.node;
    const Place out{y + row * y_stride + output, y_stride * linear.nodes};
    float* top = kernel.stack[index * K::kHalves + half][at.depth];
    const bool direct = ends_node && leaf.pops == 0 && !linear.bias && !stream;
    Pass pass{};
    pass.x = inputs(first + index, at.k);
    pass.weight = tile_data(tile) + int64_t{at.k} * kTile * 2 + half * 128;
    pass.steps = (end - at.k) / kStepInputs;
    pass.from = at.k > leaf.start ? top : nullptr;
    pass.to = direct ? out : Place{top, K::kSlotStride};
    if (!direct && ends_leaf && (leaf.pops > 0 || ends_node)) {
      pass.fold.top = top;
      pass.fold.pops = leaf.pops;
      pass.fold.to = ends_node ? out : Place{top - leaf.pops * kSlotFloats, K::kSlotStride};
      pass.fold.bias = ends_node && linear.bias ? linear.bias + output : nullptr;
      pass.fold.stream = ends_node && stream;
    }
    kernel.run(pass, lines);
  }
};

template <int kBlocks>
inline void walk(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                 int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  Walk<kBlocks>(linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin, tile_end).run();
}

inline void linear(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                   int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  if (token_begin >= token_end || tile_begin >= tile_end) return;
  const auto run = token_end - token_begin <= kRows ? walk<1> : walk<2>;
  run(linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin, tile_end);
}

// Of int8 too: over the 32 k of a group, which fill half a tile.
template <bool kBytes>
inline double multiply(int64_t iterations) {
  configure(kRows, kBytes ? kGroup : 64);
  for (int64_t i = 0; i < iterations; ++i) {
    if constexpr (kBytes) {
      multiply_add_bytes<0, 4, 6>();
      multiply_add_bytes<1, 4, 7>();
      multiply_add_bytes<2, 5, 6>();
      multiply_add_bytes<3, 5, 7>();
    } else {
      multiply_add<0, 4, 6>();
      multiply_add<1, 4, 7>();
      multiply_add<2, 5, 6>();
      multiply_add<3, 5, 7>();
    }
  }
  release();
  return static_cast<double>(iterations) * 4 * 2 * kRows * 16 * kStepInputs;
}

}  // namespace amx
}  // namespace linear_detail
}  // namespace
}  // namespace serried
