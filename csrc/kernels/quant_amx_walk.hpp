// The walk of quantized linears by AMX (see quant_amx.hpp). Tokens are cut into strips of up to 16. Loops, from the outside:
//   chunk      as many strips as keep x and their stacks of sums in the L2 cache; x is copied into tiles
//     tile     64 outputs
//       block  eight groups of k: their weights are unpacked to signed bytes and float32 scales, once for all strips,
//              and stay in L1
//         fine groups of it, all their tokens
//         half of the tile, strip, piece (of one leaf, at most four groups)
// The weights that come next are prefetched to L2 beside the units, a share beside each.
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "int8_row.hpp"
#include "quant_amx.hpp"
#include "quant_amx_fine.hpp"

namespace serried {
namespace {
namespace linear_detail {
namespace amx {

constexpr int64_t kStackBytes = 384 << 10;  // of a chunk

// Groups of one leaf, in one unit for each strip and half of a tile.
struct QuantPiece {
  int32_t group, groups, depth, node, pops;
  bool resumes, ends_leaf, ends_node;
};

// The values of a group, as signed bytes (the second half of the outputs `apart` bytes after the first), and three rows
// of 64 floats: see QuantUnit.
template <Format kFormat>
inline void unpack_group(const char* group, char* values, int64_t apart, float* scales) {
  constexpr int kSteps = kFormat == Format::kInt8 ? 8 : 4;
  for (int i = 0; i < 4 * kSteps; ++i) {
    const __m512i w = _mm512_load_si512(group + 64 * i);
    char* to = values + i % 4 / 2 * apart + i / 4 * 128 + i % 2 * 64;
    if constexpr (kFormat == Format::kInt8) {
      _mm512_store_si512(to, _mm512_xor_si512(w, _mm512_set1_epi8(-128)));
    } else {
      const __m512i offset = _mm512_set1_epi8(kFormat == Format::kInt4 ? 8 : 0);
      const __m512i low = (__m512i)low_halves((Bytes)w), high = (__m512i)high_halves((Bytes)w);
      _mm512_store_si512(to, _mm512_sub_epi8(low, offset));
      _mm512_store_si512(to + 512, _mm512_sub_epi8(high, offset));
    }
  }
  const char* halves = group + kSteps * kStepBytes;
  for (int o = 0; o < kTile; o += 16) {
    const __m512 scale = load_halves(halves + 2 * o);
    _mm512_store_ps(scales + o, scale);
    _mm512_store_ps(scales + kTile + o, _mm512_mul_ps(scale, _mm512_set1_ps(-kMagic)));
    if (kFormat == Format::kInt4Min) _mm512_store_ps(scales + 2 * kTile + o, load_halves(halves + 2 * kTile + 2 * o));
  }
}

template <Format kFormat>
struct QuantWalk {
  static constexpr bool kMinimum = kFormat == Format::kInt4Min;
  static constexpr int64_t kBytes = input_bytes(kFormat) * kGroup;  // of a group of a tile

  const Linear& linear;
  const char* x;
  const int64_t x_stride, row_stride;  // columns; bytes
  float* y;
  const int64_t y_stride;
  const int32_t token_begin, token_end, tile_begin, tile_end;
  const int32_t groups, depths;  // of the inputs; of the stacks
  int32_t chunk_begin, chunk_end;
  int64_t strip_bytes;     // of what is copied of a strip's x
  const char* copy;        // of the chunk's x: tiles (or none), then scales, strip by strip
  bool in_tiles;
  float* stacks;           // [strips][2 halves][depths][unit]
  FineChunk* fine;
  QuantTiles<kMinimum> tiles;
  alignas(64) char values[2][kBlockGroups * kGroupWeights];  // by half of the tile
  alignas(64) float scales[2][kBlockGroups * kGroupScales];  // the last unit of a block is added up during the next
  int turn = 0;

  // Large: what is not set here is not cleared.
  QuantWalk(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride, int32_t token_begin,
            int32_t token_end, int32_t tile_begin, int32_t tile_end)
      : linear(linear), x(static_cast<const char*>(x)), x_stride(x_stride),
        row_stride(row_bytes(Dtype::kInt8, x_stride)), y(y), y_stride(y_stride), token_begin(token_begin),
        token_end(token_end), tile_begin(tile_begin), tile_end(tile_end), groups(linear.inputs / kGroup),
        depths(stack_depth()) {}

  void run() {
    const int32_t count = token_end - token_begin, strips = (count + kRows - 1) / kRows;
    in_tiles = tile_end - tile_begin >= 4;
    const int64_t scale_bytes = int64_t{groups} * kGroupScalesX * 4;
    strip_bytes = (in_tiles ? int64_t{groups} * kGroupX : 0) + scale_bytes;
    tiles.tokens = even_rows(count, kRows);
    tiles.x_stride = in_tiles ? kGroup : row_stride;
    tiles.x_step = in_tiles ? kGroupX : kGroup;
    tiles.y_stride = y_stride * linear.nodes;
    tiles.slot_floats = kUnitFloats;
    tiles.stream = may_stream();
    const int64_t stack_bytes = int64_t{2} * depths * kUnitFloats * 4;
    const int64_t fit = std::min(kChunkBytes / (int64_t{groups} * kGroupX + scale_bytes), kStackBytes / stack_bytes);
    const int32_t chunk = even_rows(strips, static_cast<int32_t>(std::max<int64_t>(1, fit)));
    thread_local Scratch scratch;
    thread_local FineChunk fine_scratch;
    fine = &fine_scratch;
    char* memory = scratch.take(static_cast<size_t>(chunk * (strip_bytes + stack_bytes)));
    copy = memory;
    stacks = reinterpret_cast<float*>(memory + chunk * strip_bytes);
    configure(tiles.tokens, kGroup);
    for (chunk_begin = 0; chunk_begin < strips; chunk_begin = chunk_end) {
      chunk_end = std::min(strips, chunk_begin + chunk);
      run_chunk(memory);
    }
    release();
    if (tiles.stream) _mm_sfence();
  }

 private:
  int32_t first_token(int32_t strip) const {
    return std::min(token_begin + strip * tiles.tokens, token_end - tiles.tokens);
  }
  const char* tile_data(int32_t tile) const {
    return static_cast<const char*>(linear.weight) + tile * groups * kBytes;
  }
  Int8Row<const char> row(int32_t token) const { return {x + token * row_stride, x_stride}; }
  int32_t stack_depth() const {
    int32_t depth = 0, most = 1;
    for (int32_t i = 0; i < linear.leaf_count; ++i) {
      most = std::max(most, ++depth);
      depth = linear.leaves[i].ends_node ? 0 : depth - linear.leaves[i].pops;
    }
    return most;
  }
  bool may_stream() const {
    const int64_t bytes = int64_t{token_end - token_begin} * linear.nodes * (tile_end - tile_begin) * kTile * 4;
    return bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(y) % 64 == 0 && y_stride % 16 == 0;
  }

  void run_chunk(char* memory) {
    for (int32_t strip = chunk_begin; strip < chunk_end; ++strip)
      copy_strip(memory + (strip - chunk_begin) * strip_bytes, first_token(strip));
    fine->take(chunk_end - chunk_begin, tiles.tokens, groups,
               [&](int32_t strip, int32_t m) { return row(first_token(chunk_begin + strip) + m); });
    tiles.ahead = AheadWalk(tile_data(tile_begin), tile_data(tile_end));
    for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
      Position at;
      at.k = linear.leaves[0].start;
      while (at.leaf < linear.leaf_count) {
        QuantPiece pieces[kBlockGroups];
        run_block(tile, pieces, next_block(at, pieces));
      }
    }
    tiles.finish();
  }

  void copy_strip(char* to, int32_t token) const {
    auto* x_scales = reinterpret_cast<float*>(to + strip_bytes - int64_t{groups} * kGroupScalesX * 4);
    for (int32_t m = 0; m < tiles.tokens; ++m) {
      const Int8Row from = row(token + m);
      for (int32_t g = 0; g < groups; ++g) {
        if (in_tiles) {
          _mm256_store_si256(reinterpret_cast<__m256i*>(to + g * kGroupX + m * kGroup),
                             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from.high + g * kGroup)));
        }
        x_scales[g * kGroupScalesX + m] = from.scales[g];
        if (kMinimum) x_scales[g * kGroupScalesX + kRows + m] = from.scales[g] * static_cast<float>(from.sums[g]);
      }
    }
  }

  // The pieces of the next block, from `at`, which moves behind them.
  int32_t next_block(Position& at, QuantPiece (&pieces)[kBlockGroups]) const {
    int32_t count = 0;
    for (int32_t left = kBlockGroups; left > 0 && at.leaf < linear.leaf_count;) {
      const Leaf& leaf = linear.leaves[at.leaf];
      const int32_t stop = leaf_stop(leaf), now = std::min({left, kUnitGroups, (stop - at.k) / kGroup});
      QuantPiece& piece = pieces[count++];
      piece = {at.k / kGroup, now, at.depth, at.node, leaf.pops, at.k > leaf.start, at.k + now * kGroup == stop, false};
      at.k += now * kGroup;
      left -= now;
      if (!piece.ends_leaf) continue;
      piece.ends_node = leaf.ends_node;
      at.depth = leaf.ends_node ? 0 : at.depth - leaf.pops + 1;
      at.node += leaf.ends_node;
      if (++at.leaf < linear.leaf_count) at.k = linear.leaves[at.leaf].start;
    }
    return count;
  }

  void run_block(int32_t tile, const QuantPiece* pieces, int32_t count) {
    const char* weights = tile_data(tile);
    turn ^= 1;
    const int32_t strips = chunk_end - chunk_begin;
    int32_t total = 0;
    bool has_fine = false;
    for (int32_t i = 0; i < count; ++i) {
      for (int32_t g = 0; g < pieces[i].groups; ++g, ++total) {
        unpack_group<kFormat>(weights + (pieces[i].group + g) * kBytes, values[0] + total * kGroupWeights,
                              sizeof values[0], scales[turn] + total * kGroupScales);
        has_fine |= fine->count(pieces[i].group + g) > 0;
        for (int64_t step = strips <= 2 ? kBytes / kStepBytes / 3 : 0; step >= 0; --step) tiles.ahead.step();
      }
    }
    if (has_fine) multiply_fine(pieces, count);
    const int64_t end = (weights - tile_data(tile_begin) + (pieces[0].group + total) * kBytes) / kStepBytes;
    int32_t pieces_left = 2 * strips * count * 2 * kUnitGroups;
    for (int half = 0; half < 2; ++half) {
      for (int32_t strip = chunk_begin; strip < chunk_end; ++strip) {
        int32_t done = 0;
        for (int32_t i = 0; i < count; done += pieces[i++].groups, pieces_left -= 2 * kUnitGroups) {
          const int64_t left = std::max<int64_t>(0, end - tiles.ahead.steps);
          tiles.ahead_steps = static_cast<int32_t>((left + pieces_left - 1) / pieces_left);
          fill(tiles.next(), tile, pieces[i], half, strip, done);
          tiles.run();
        }
      }
    }
  }

  // The units that wait hold tiles, and the low sums of the block before.
  void multiply_fine(const QuantPiece* pieces, int32_t count) {
    tiles.finish();
    for (int32_t i = 0, at = 0; i < count; ++i) {
      for (int32_t g = 0; g < pieces[i].groups; ++g, ++at)
        fine->multiply(pieces[i].group + g, at, values[0] + at * kGroupWeights, sizeof values[0]);
    }
  }

  // done: the piece's first group in the block.
  void fill(QuantUnit& unit, int32_t tile, const QuantPiece& piece, int half, int32_t strip, int32_t done) const {
    const int64_t row = int64_t{first_token(strip)} * linear.nodes + piece.node;
    const int64_t output = int64_t{tile} * kTile + half * kUnitOutputs;
    const char* own = copy + (strip - chunk_begin) * strip_bytes;
    const auto* x_scales = reinterpret_cast<const float*>(own + strip_bytes) - int64_t{groups} * kGroupScalesX;
    unit.x = in_tiles ? own + piece.group * kGroupX : x + first_token(strip) * row_stride + piece.group * kGroup;
    unit.weights = values[half] + done * kGroupWeights;
    unit.x_scales = x_scales + piece.group * kGroupScalesX;
    unit.w_scales = scales[turn] + done * kGroupScales + half * kUnitOutputs;
    unit.groups = piece.groups;
    fine->tokens(unit, strip - chunk_begin, piece.group, piece.groups);
    unit.tile_shift = -int64_t{piece.group} * kGroupTiles;
    unit.low = fine->low(piece.group, done, half);
    unit.sums = stacks + (((strip - chunk_begin) * 2 + half) * depths + piece.depth) * kUnitFloats;
    unit.resumes = piece.resumes;
    unit.ends_leaf = piece.ends_leaf;
    unit.ends_node = piece.ends_node;
    unit.pops = piece.pops;
    unit.y = y + row * y_stride + output;
    unit.bias = linear.bias ? linear.bias + output : nullptr;
  }
};

}  // namespace amx
}  // namespace linear_detail
}  // namespace
}  // namespace serried
