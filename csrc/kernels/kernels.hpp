// The contract between the program and the kernels: plain structs, and a table of functions that each instruction set
// fills. This header is compiled into every variant, so it must hold no inline code that would be shared at link time.
#pragma once
#include <cstddef>
#include <cstdint>

namespace serried {

// Rows of a weight are stored in tiles of 64 outputs. A tile walks the inputs in one straight line:
//   bf16:    [k / 2][64 outputs][2]   (pairs of k side by side: vdpbf16ps, tdpbf16ps)
//   float32: [k][64 outputs]
// so that each step of the walk is 256 bytes. Inputs are padded with zeros to a multiple of 32, outputs to 64.
// Quantized formats go in groups of 32 inputs, each group with its scale beside it:
//   int8:     [k / 32] { u8 [8][64 outputs][4], float16 scale [64] }                          2176 bytes a group
//             w = scale * (u8 - 128)
//   int4:     [k / 32] { u8 [4][64 outputs][4], float16 scale [64] }                          1152 bytes a group
//             byte [f][o][i] holds k = 4 f + i of the group in its low half, k = 16 + 4 f + i in its high half
//             w = scale * (q - 8)
//   int4_min: the same, then float16 minimum [64]: w = scale * q + minimum                    1280 bytes a group
constexpr int kTile = 64;
constexpr int kPad = 32;            // inputs (columns of x and of a weight) come in multiples of this
constexpr int kAttentionBlock = 32;     // positions
constexpr int kAttentionSegment = 256;  // positions; a segment has its own maximum, sum and output

// Of activations. A row of kInt8, `stride` columns (a multiple of 64), is in groups of 32 columns: a value is scale * q.
//   int8    high [stride]        q; of a fine group (one with outliers) q / 8, rounded: q = 8 * high + low
//   float32 scale [stride / 32]
//   int32   sum [stride / 32]    of the group's q
//   uint8   fine [stride / 32]   0 or 1
//   int8    low [stride]         -4 to 3; of fine groups only, elsewhere it holds anything
enum class Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };
// Of weights. A weight takes x in float32, bf16, or (all quantized formats) int8.
enum class Format : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3, kInt4Min = 4 };
enum class Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kFineSteps = 8;         // of a fine group, in one step of another: |q| is at most 8 * 127
constexpr int kFineSquares = 25600;   // a group whose q, at most 127, have squares of a smaller sum becomes fine

namespace {

// Bytes of a row of activations of `stride` columns.
constexpr int64_t row_bytes(Dtype dtype, int64_t stride) {
  if (dtype == Dtype::kInt8) return (2 * stride + stride / kGroup * 9 + 63) / 64 * 64;
  return stride * (dtype == Dtype::kFloat32 ? 4 : 2);
}

// Bytes that a tile of a weight has for each input (those of the scales included: all are whole numbers).
constexpr int64_t input_bytes(Format format) {
  switch (format) {
    case Format::kFloat32: return 4 * kTile;
    case Format::kBFloat16: return 2 * kTile;
    case Format::kInt8: return kTile + 2 * kTile / kGroup;
    case Format::kInt4: return kTile / 2 + 2 * kTile / kGroup;
    default: return kTile / 2 + 4 * kTile / kGroup;
  }
}

}  // namespace

// One leaf of a row-parallel linear, in the rank's own columns. After its sum has been pushed on a stack, the two
// topmost entries are added `pops` times (top of stack to the right); `ends_node`: then the one entry left is a node.
// A column-parallel linear is one leaf over all its inputs.
struct Leaf {
  int32_t start, stop;  // multiples of 32, but for the last stop, which may be padded up to one
  int32_t pops;
  int32_t ends_node;
};

struct Linear {
  const void* weight;   // [tiles][inputs][64] in the layout above; 64-byte aligned
  const float* bias;    // [tiles * 64] (padded with zeros), or null; only with one node
  const Leaf* leaves;
  int32_t leaf_count;
  int32_t nodes;        // per token
  int32_t inputs;       // padded to a multiple of 32
  int32_t tiles;
};

// y[(token * nodes + node) * y_stride + output] (float32) = x[token] . weight[output], leaf by leaf, for the tokens
// [token_begin, token_end) and tiles [tile_begin, tile_end). x: bf16 or float32 like the weight, [tokens, x_stride],
// columns beyond the real inputs are zeros. One output element has one chain of additions, whatever the ranges are.
// An int8 x has x_stride columns (so rows of row_bytes(kInt8, x_stride)); the quantized formats compute, group by group of
// 32 inputs in ascending order, one accumulator an output: sum += (scale_w * scale_x) * exact integer sum
// (int4_min: then sum += minimum_w * (scale_x * sum of x)), in an order that each instruction set states once.
using LinearFn = void (*)(const Linear&, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                          int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end);

// Copies rows [row, row + rows) of a weight into its tiles. source: [rows, columns] bf16 or float32 (rounded to
// nearest even for a bf16 weight). Tiles are zeroed before the first call. For the unquantized formats.
using PackFn = void (*)(void* tiles, Format weight, int32_t inputs, int64_t row, int64_t rows, const void* source,
                        Dtype from, int64_t columns, int64_t source_stride);

// Quantizes rows of float32 or bf16 into the blocks of GGML, a block for each 32 columns (the last padded with zeros),
// as ggml's reference does: int8: Q8_0 {float16 d, int8 [32]}, 34 bytes; int4: Q4_0 {float16 d, 16 bytes}, 18;
// int4_min: Q4_1 {float16 d, float16 m, 16 bytes}, 20; low halves of the bytes first. block_stride: bytes between rows.
using QuantizeFn = void (*)(Format, const void* source, Dtype from, int64_t rows, int64_t columns, int64_t source_stride,
                            void* blocks, int64_t block_stride);
// Copies rows of such blocks (block_count a row) into tiles: bit for bit, no value changes. Tiles are zeroed before.
using PackBlocksFn = void (*)(void* tiles, Format, int32_t inputs, int64_t row, int64_t rows, const void* blocks,
                              int64_t block_count, int64_t block_stride);
// Blocks of Q4_K ([rows][superblocks of 256], 144 bytes each) as blocks of Q4_1 (scale and minimum rounded to float16).
using RepackQ4KFn = void (*)(const void* source, int64_t source_stride, int64_t rows, int64_t superblocks, void* blocks,
                             int64_t block_stride);

// A row of a tiled weight as float32 [columns].
using UnpackRowFn = void (*)(const void* tiles, Format weight, int32_t inputs, int64_t row, float* out, int64_t columns);

// Wherever a row is written as kInt8 (norm, reduce_add_norm, gated, round): the float32 values of each group of 32
// columns are scaled by 127 / their largest magnitude (a group of zeros: scale 0) and rounded to nearest even. Where few
// of them use those steps, for an outlier has set the scale (the sum of their squares is below kFineSquares), they are
// scaled by 1016 / the largest magnitude instead: the group is fine.

// out = x / sqrt(mean(x^2) + eps) * weight, for `rows` rows of [columns]; out: bf16 or float32, [rows, out_stride],
// zeros in the padding up to out_stride.
using NormFn = void (*)(const float* x, int64_t x_stride, const float* weight, float eps, int64_t columns, void* out,
                        Dtype out_dtype, int64_t out_stride, int64_t rows);

// For each row: fold slots in the order of `adds` (slot[to] += slot[from]; the result is slots[result]), add bias (or
// null), add to the residual, which is written back; then, if weight is not null, RMSNorm into out. slots: `count`
// pointers to float32 rows, slot s of row r at slots[s] + r * slot_stride.
struct Add {
  int32_t to, from;
};
struct ReduceAddNorm {
  const Add* adds;
  int32_t add_count, count, result;
  int64_t columns;
  const float* bias;
  const float* weight;
  float eps;
};
using ReduceAddNormFn = void (*)(const ReduceAddNorm&, const float* const* slots, int64_t slot_stride, float* residual,
                                 int64_t residual_stride, void* out, Dtype out_dtype, int64_t out_stride, int64_t rows);
// The fold (and bias) alone: out float32 [rows, out_stride].
using FoldFn = void (*)(const ReduceAddNorm&, const float* const* slots, int64_t slot_stride, float* out,
                        int64_t out_stride, int64_t rows);

// residual += RMSNorm(x) by `inner`, written back; then RMSNorm of the residual by `weight` into out.
using NormAddNormFn = void (*)(const float* x, int64_t x_stride, const float* inner, float* residual,
                               int64_t residual_stride, const float* weight, float eps, int64_t columns, void* out,
                               Dtype out_dtype, int64_t out_stride, int64_t rows);

// out[row] = activation(gate) * up; gate and up are float32 rows of `columns`; out is zero-padded to out_stride.
using GatedFn = void (*)(Activation, const float* gate, const float* up, int64_t in_stride, void* out, Dtype out_dtype,
                         int64_t columns, int64_t out_stride, int64_t rows);
// x = activation(x) in place, over n floats.
using ActivateFn = void (*)(Activation, float* x, int64_t n);
// x = cap * tanh(x / cap) in place, over n floats.
using SoftcapFn = void (*)(float cap, float* x, int64_t n);
// float32 or bf16 -> bf16 (nearest even), float32 or int8, row by row, zero-padded to out_stride.
using RoundFn = void (*)(const void* x, Dtype x_dtype, int64_t x_stride, void* out, Dtype out_dtype, int64_t columns,
                         int64_t out_stride, int64_t rows);

// The KV cache of one layer: K and V each [slots, kv_heads, head_dim] in the cache's dtype, slots = blocks * block_size.
struct Attention {
  int32_t query_heads, kv_heads, head_dim;
  int32_t rotary_dim;          // the first so many columns of a head are rotated
  const int32_t* kv_map;       // [query_heads] -> local KV head
  float scale;
  float softcap;               // scaled scores x become softcap * tanh(x / softcap); 0: as they are
  int32_t window;              // positions seen, the token itself included; 0: all
  Dtype dtype;                 // of the cache, and what q, k and v are rounded to
  const float* q_norm;         // [head_dim] or null (then k_norm is null too)
  const float* k_norm;
  float norm_eps;
  const float* cos;            // [positions, rotary_dim / 2]
  const float* sin;
  void* k_cache;
  void* v_cache;
  int32_t block_size;
};

// Query heads, and KV heads, from one to another.
struct Heads {
  int32_t query_begin, query_end, kv_begin, kv_end;
};
// For some heads of tokens [begin, end): q and k of qkv [T, qkv_stride] (q heads | k heads | v heads, float32) are
// normalized head by head, rotated (the first half of the rotary columns against their second half), rounded; k and v
// go to the token's slot, q to q_out [T, query_heads * head_dim] in the cache's dtype.
using RopeWriteFn = void (*)(const Attention&, const float* qkv, int64_t qkv_stride, const int32_t* positions,
                             const int32_t* slots, void* q_out, int64_t q_stride, int32_t begin, int32_t end,
                             const Heads& heads);

// One sequence's step: its tokens' rows of q and out, their positions (consecutive), and its block table.
struct Sequence {
  int32_t row_begin, row_end;  // in T
  int32_t kv_len;              // positions in the cache, this step's included
  const int32_t* blocks;
  const Sequence* next;  // whose K the same thread will read next, for the same heads; null: nobody knows
  bool begun;            // this one has been some call's next: its first K is on its way
};
// out[row, head] (columns head * head_dim..., in the cache's dtype, [T, out_stride]) for the rows [row_begin, row_end)
// of the sequence and heads [head_begin, head_end). scratch: attention_scratch floats. Reads positions in blocks of 32
// counted from the start of the sequence; each segment of 256 positions has its own maximum, sum and output, merged in
// the order of their index; positions that a token does not see are masked in K and in V (they may hold NaN).
using AttendFn = void (*)(const Attention&, const Sequence&, const int32_t* positions, const void* q, int64_t q_stride,
                          void* out, int64_t out_stride, int32_t row_begin, int32_t row_end, int32_t head_begin,
                          int32_t head_end, float* scratch);

// The largest of n logits, lowest index first among equals: its index and value. NaN counts as -inf.
using ArgmaxFn = void (*)(const float* logits, int64_t n, int64_t* index, float* value);
// Of one row of logits: how many are above -inf; the places of the largest; of each leaf of 64 (the last may be short)
// the maximum / divisor, and the sum of exp((x - maximum) / divisor), where leaf_sum is not null.
struct SurveyRow {
  int64_t possible, found;
  int64_t* places;
  double *leaf_max, *leaf_sum;
};
// count: how many places at most.
using SurveyFn = void (*)(const float* logits, int64_t n, int64_t count, double divisor, SurveyRow* row);
// The largest of logits[i] / temperature + noise, and where; noise of token first_id + i: see sampling.hpp.
using GumbelArgmaxFn = void (*)(const float* logits, int64_t n, int64_t first_id, double temperature, uint64_t seed,
                                uint32_t position, int64_t* index, double* score);
// The noise of some tokens.
using GumbelNoiseFn = void (*)(uint64_t seed, uint32_t position, const int64_t* ids, int64_t n, double* noise);
// out[i] += in[i] (ring, plain sums).
using AddFn = void (*)(float* out, const float* in, int64_t n);
// Reads n bytes (a multiple of 256) as fast as it can; returns something that depends on them.
using ReadFn = uint64_t (*)(const void* data, size_t n);
// Multiplies in registers only for about `iterations` rounds; returns the floating-point operations done, by the
// set's fastest instruction for the dtype.
using MultiplyFn = double (*)(Dtype, int64_t iterations);

struct Kernels {
  const char* isa;  // "baseline", "avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx"
  void (*begin_thread)();  // flush-to-zero, denormals-are-zero; what else the set needs once a thread
  LinearFn linear[5];  // by Format
  PackFn pack;
  QuantizeFn quantize;
  PackBlocksFn pack_blocks;
  RepackQ4KFn repack_q4_k;
  UnpackRowFn unpack_row;
  NormFn norm;
  ReduceAddNormFn reduce_add_norm;
  FoldFn fold;
  NormAddNormFn norm_add_norm;
  GatedFn gated;
  ActivateFn activate;
  SoftcapFn softcap;
  RoundFn round;
  RopeWriteFn rope_write;
  AttendFn attend;
  int64_t (*attend_scratch)(const Attention&);
  ArgmaxFn argmax;
  SurveyFn survey;
  GumbelArgmaxFn gumbel_argmax;
  GumbelNoiseFn gumbel_noise;
  AddFn add;
  ReadFn read;
  MultiplyFn multiply;
};

}  // namespace serried

// The one symbol that a variant's shared object exports.
extern "C" const serried::Kernels* serried_kernels();
