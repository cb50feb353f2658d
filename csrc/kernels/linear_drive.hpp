// What linears by vectors share: the walk over tokens, tiles and leaves (AMX has its own). See linear.hpp.
//
// Tokens are cut into blocks of equal size (at most what a kernel takes at once); the last block is moved back to end
// at the last token, so some tokens may be computed twice, to the same bits. Loops, from the outside:
//   chunk of blocks   as many as keep x in the L2 cache; a weight tile is read from memory once a chunk
//     tile            64 outputs, all inputs
//       batch         a few blocks, each with a stack of leaf sums of its own
//         group       a stretch of inputs, whole leaves where possible, whose weights stay near for the batch
//           block
//             segment the part of one leaf inside the group: one accumulator chain
// A chain that a group's end cuts is stored as float32 and taken up again: the same additions in the same order.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels.hpp"

namespace serried {
namespace {
namespace linear_detail {

constexpr int kStepBytes = 256;  // what a tile holds of one pair of k (bf16) or one k (float32)
constexpr int kStackDepth = 8;   // a tree of depth 6 has at most 7 sums waiting, the newest included
// Software prefetch runs this far ahead of a straight walk. Sapphire Rapids reads best with 1 to 2 KB (10 % less with
// 4 KB), Zen 4, which the set with BF16 but without AMX is for, with 4.
#if SERRIED_avx512_bf16
constexpr int kPrefetchBytes = 4096;
#else
constexpr int kPrefetchBytes = 2048;
#endif
constexpr int64_t kChunkBytes = 1 << 20;  // of x

// A leaf's sum (or what there is of it) for a block of tokens, and what becomes of it.
struct Segment {
  const char* weight;  // the tile at the segment's first k
  const char* x;       // the block's first token at the segment's first k
  int32_t k;           // which that is
  int32_t inputs;      // how many k, a multiple of 32
  bool resumes;        // go on from `slot`, not from zero
  bool ends_leaf;      // then add the `pops` sums below `slot` in the stack ...
  int32_t pops;
  bool ends_node;      // ... and put the result in y, or else `pops` slots below `slot`
  float* slot;         // [tokens][64], the top of the block's stack
  float* y;            // the block's first token, this node, this tile's outputs
  const float* bias;   // of the tile, or null; added where a node ends
};

// Where the walk over the leaves stands.
struct Position {
  int32_t leaf = 0, k = 0, depth = 0, node = 0;
};

// The last leaf may end with the real inputs: the padding after them is part of it.
inline int32_t leaf_stop(const Leaf& leaf) { return (leaf.stop + kPad - 1) / kPad * kPad; }

// Where the group that begins here ends. Small leaves: at the last one that ends within `most` inputs, or, where a
// kernel wants one leaf at a time, after the first. A leaf that is longer than `most` is cut.
inline int32_t group_end(const Linear& linear, const Position& at, int32_t most, bool one_leaf) {
  int32_t end = at.k;
  for (int32_t leaf = at.leaf; leaf < linear.leaf_count; ++leaf) {
    const int32_t stop = leaf_stop(linear.leaves[leaf]);
    if (stop - at.k > most || (one_leaf && leaf > at.leaf)) break;
    end = stop;
  }
  return end > at.k ? end : at.k + most;
}

// Kernel: kElement (bytes of an element of x), kInputBytes (what a tile has for one k), kBatch, kGroupInputs, kOneLeaf
// (see group_end), slot(stack, depth) and run(Segment).
template <class Kernel>
struct Driver {
  const Linear& linear;
  const char* x;
  int64_t x_stride;  // bytes
  float* y;
  int64_t y_stride;
  int32_t token_begin, token_end, rows;  // rows: tokens in a block
  Kernel& kernel;

  int32_t first_token(int32_t block) const { return std::min(token_begin + block * rows, token_end - rows); }
  const char* tile_data(int32_t tile) const {
    return static_cast<const char*>(linear.weight) + Kernel::kInputBytes * tile * linear.inputs;
  }

  void run(int32_t tile_begin, int32_t tile_end) {
    const int32_t blocks = (token_end - token_begin + rows - 1) / rows;
    const int64_t block_bytes = int64_t{rows} * linear.inputs * Kernel::kElement;
    const int32_t fit = static_cast<int32_t>(std::min<int64_t>(blocks, kChunkBytes / block_bytes));
    const int32_t chunk = std::max(fit / Kernel::kBatch, 1) * Kernel::kBatch;
    for (int32_t begin = 0; begin < blocks; begin += chunk) {
      const int32_t end = std::min(blocks, begin + chunk);
      for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
        for (int32_t block = begin; block < end; block += Kernel::kBatch) {
          const int32_t batch = std::min(Kernel::kBatch, end - block);
          run_batch(tile, block, batch);
        }
      }
    }
  }

  void run_batch(int32_t tile, int32_t block, int32_t batch) {
    const int32_t most = batch > 1 ? Kernel::kGroupInputs : linear.inputs;
    Position at;
    at.k = linear.leaves[0].start;
    while (at.leaf < linear.leaf_count) {
      const int32_t end = group_end(linear, at, most, batch > 1 && Kernel::kOneLeaf);
      Position after = at;
      for (int32_t i = 0; i < batch; ++i) {
        after = at;
        run_group(after, end, tile, block + i, i);
      }
      at = after;
    }
  }

  void run_group(Position& at, int32_t end, int32_t tile, int32_t block, int32_t stack) {
    const int32_t token = first_token(block);
    const char* weight = tile_data(tile);
    const char* tokens = x + token * x_stride;
    Segment s{};
    do {
      const Leaf& leaf = linear.leaves[at.leaf];
      const int32_t leaf_end = leaf_stop(leaf), stop = std::min(leaf_end, end);
      s.weight = weight + at.k * Kernel::kInputBytes;
      s.x = tokens + int64_t{at.k} * Kernel::kElement;
      s.k = at.k;
      s.inputs = stop - at.k;
      s.resumes = at.k > leaf.start;
      s.ends_leaf = stop == leaf_end;
      s.pops = leaf.pops;
      s.ends_node = s.ends_leaf && leaf.ends_node;
      s.slot = kernel.slot(stack, at.depth);
      s.y = y + (int64_t{token} * linear.nodes + at.node) * y_stride + int64_t{tile} * kTile;
      s.bias = linear.bias ? linear.bias + int64_t{tile} * kTile : nullptr;
      kernel.run(s);
      at.k = stop;
      if (!s.ends_leaf) continue;
      at.depth = s.ends_node ? 0 : at.depth - leaf.pops + 1;
      at.node += s.ends_node;
      if (++at.leaf < linear.leaf_count) at.k = linear.leaves[at.leaf].start;
    } while (at.leaf < linear.leaf_count && at.k < end);
  }
};

// x_stride: in bytes.
template <class Kernel>
inline void drive(Kernel& kernel, const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                  int32_t token_begin, int32_t token_end, int32_t rows, int32_t tile_begin, int32_t tile_end) {
  Driver<Kernel> driver{linear, static_cast<const char*>(x), x_stride, y, y_stride, token_begin, token_end, rows, kernel};
  driver.run(tile_begin, tile_end);
}

// Tokens in blocks of at most `most`, as even as can be.
inline int32_t even_rows(int32_t tokens, int32_t most) {
  const int32_t blocks = (tokens + most - 1) / most;
  return (tokens + blocks - 1) / blocks;
}

}  // namespace linear_detail
}  // namespace
}  // namespace serried
