// Linears from tiled weights, and what belongs to them: packing, the limits of memory and arithmetic.
//
//   linear_drive.hpp   the walk over tokens, tiles and leaves, for every set
//   linear_vector.hpp  vector multiply-adds: bf16 and float32
//   linear_amx.hpp     bf16 by AMX tiles; linear_amx_few.hpp: the same bits by vectors, for few tokens
//   linear_quant.hpp   quantized weights by vectors; quant_amx_walk.hpp: by AMX tiles; quant_amx_few.hpp: of a batch
//
// An output element has one accumulator over ascending k inside a leaf, whatever the batch; the sums of leaves are
// then added in float32 in the order that the leaf table states.
#pragma once
#include <cstdint>
#include <cstring>

#include "blocks.hpp"
#include "kernels.hpp"
#include "linear_drive.hpp"
#include "linear_quant.hpp"
#include "linear_vector.hpp"
#if SERRIED_amx
#include <sys/syscall.h>
#include <unistd.h>

#include "linear_amx.hpp"
#include "linear_amx_few.hpp"
#include "quant_amx_few.hpp"
#include "quant_amx_walk.hpp"
#endif

namespace serried {
namespace {

// Denormals are zero, in and out: vdpbf16ps and tdpbf16ps treat them so in any case.
void begin_thread() {
#if defined(__x86_64__)
  unsigned int control = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(control | 0x8040);  // FTZ, DAZ
#elif defined(__aarch64__)
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" ::"r"(control | (uint64_t{1} << 24)));  // FZ
#endif
#if SERRIED_amx
  // The process asks Linux for tile registers (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); asking again does no harm.
  syscall(SYS_arch_prctl, 0x1023, 18);
#endif
}

void linear_f32(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride, int32_t token_begin,
                int32_t token_end, int32_t tile_begin, int32_t tile_end) {
  linear_detail::linear_by_vectors<linear_detail::Float32>(linear, x, x_stride, y, y_stride, token_begin, token_end,
                                                           tile_begin, tile_end);
}

void linear_bf16(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                 int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
#if SERRIED_amx
  if (token_end - token_begin <= linear_detail::amx::kFew) {
    linear_detail::amx::linear_few(linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin, tile_end);
    return;
  }
  linear_detail::amx::linear(linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin, tile_end);
#else
  linear_detail::linear_by_vectors<linear_detail::Bf16>(linear, x, x_stride, y, y_stride, token_begin, token_end,
                                                        tile_begin, tile_end);
#endif
}

template <Format kFormat>
void linear_quantized(const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                      int32_t token_begin, int32_t token_end, int32_t tile_begin, int32_t tile_end) {
#if SERRIED_amx
  const int32_t tokens = token_end - token_begin;
  if (tile_begin < tile_end && tokens > linear_detail::kFewTokens<kFormat>) {
    if (tokens <= linear_detail::amx::kFewSets * linear_detail::amx::kRows) {
      return linear_detail::amx::linear_quant_few<kFormat>(linear, x, x_stride, y, y_stride, token_begin, token_end,
                                                           tile_begin, tile_end);
    }
    using Walk = linear_detail::amx::QuantWalk<kFormat>;
    return Walk(linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin, tile_end).run();
  }
#endif
  linear_detail::quant_by_vectors<kFormat>(linear, x, x_stride, y, y_stride, token_begin, token_end, tile_begin,
                                           tile_end);
}

namespace linear_detail {

// To nearest even; a NaN stays one (quiet, its upper bits kept).
inline uint16_t bf16_bits(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

inline float as_float(float value) { return value; }
inline float as_float(uint16_t value) { return bf16_value(value); }
inline void assign(float& to, float value) { to = value; }
inline void assign(float& to, uint16_t value) { to = bf16_value(value); }
inline void assign(uint16_t& to, float value) { to = bf16_bits(value); }
inline void assign(uint16_t& to, uint16_t value) { to = value; }

// Inputs that are transposed at once, in L1: 64 rows of them, and as many lines of the tile.
constexpr int kPackInputs = 32;

// Rows [first, last) of one tile, columns [k, k + count), from source (row `first`, column k) to the tile at k.
// A unit is what stays together: a pair of k in bf16, one k in float32.
template <int kPair, class To, class From>
inline void pack_square(To* tile, const From* source, int64_t stride, int first, int last, int count) {
  alignas(64) To rows[kTile][kPackInputs];
  for (int r = first; r < last; ++r) {
    const From* from = source + (r - first) * stride;
    for (int k = 0; k < count; ++k) assign(rows[r][k], from[k]);
    for (int k = count; k < kPackInputs; ++k) rows[r][k] = 0;
  }
  const int units = (count + kPair - 1) / kPair;
  for (int u = 0; u < units; ++u) {
    To* to = tile + u * kTile * kPair;
    for (int r = first; r < last; ++r) std::memcpy(to + r * kPair, rows[r] + u * kPair, sizeof(To) * kPair);
  }
}

template <int kPair, class To, class From>
void pack_rows(To* tiles, int32_t inputs, int64_t row, int64_t rows, const From* source, int64_t columns,
               int64_t stride) {
  for (const int64_t end = row + rows; row < end;) {
    const int64_t tile = row / kTile;
    const int first = static_cast<int>(row % kTile);
    const int last = static_cast<int>(std::min<int64_t>(kTile, first + end - row));
    To* to = tiles + tile * inputs * kTile;
    for (int64_t k = 0; k < columns; k += kPackInputs) {
      const int count = static_cast<int>(std::min<int64_t>(kPackInputs, columns - k));
      pack_square<kPair>(to + k * kTile, source + k, stride, first, last, count);
    }
    source += (last - first) * stride;
    row += last - first;
  }
}

}  // namespace linear_detail

void pack(void* tiles, Format weight, int32_t inputs, int64_t row, int64_t rows, const void* source, Dtype from,
          int64_t columns, int64_t source_stride) {
  using linear_detail::pack_rows;
  const auto* floats = static_cast<const float*>(source);
  const auto* halves = static_cast<const uint16_t*>(source);
  if (weight == Format::kBFloat16) {
    auto* to = static_cast<uint16_t*>(tiles);
    if (from == Dtype::kBFloat16) return pack_rows<2>(to, inputs, row, rows, halves, columns, source_stride);
    return pack_rows<2>(to, inputs, row, rows, floats, columns, source_stride);
  }
  auto* to = static_cast<float*>(tiles);
  if (from == Dtype::kBFloat16) return pack_rows<1>(to, inputs, row, rows, halves, columns, source_stride);
  pack_rows<1>(to, inputs, row, rows, floats, columns, source_stride);
}

void unpack_row(const void* tiles, Format weight, int32_t inputs, int64_t row, float* out, int64_t columns) {
  const int64_t tile = row / kTile, output = row % kTile;
  if (weight != Format::kFloat32 && weight != Format::kBFloat16)
    return blocks::unpack(static_cast<const uint8_t*>(tiles), weight, inputs, row, out, columns);
  if (weight == Format::kBFloat16) {
    const auto* from = static_cast<const uint16_t*>(tiles) + tile * inputs * kTile + output * 2;
    for (int64_t k = 0; k < columns; ++k) out[k] = linear_detail::bf16_value(from[k / 2 * 2 * kTile + k % 2]);
  } else {
    const auto* from = static_cast<const float*>(tiles) + tile * inputs * kTile + output;
    for (int64_t k = 0; k < columns; ++k) out[k] = from[k * kTile];
  }
}

uint64_t read_bytes(const void* data, size_t n) { return linear_detail::read_all(static_cast<const char*>(data), n); }

double multiply(Dtype dtype, int64_t iterations) {
#if SERRIED_amx
  if (dtype != Dtype::kFloat32) {
    return dtype == Dtype::kInt8 ? linear_detail::amx::multiply<true>(iterations)
                                 : linear_detail::amx::multiply<false>(iterations);
  }
#elif SERRIED_avx512_bf16
  if (dtype == Dtype::kBFloat16) return linear_detail::multiply_pairs(iterations);
#endif
  if (dtype == Dtype::kInt8) return linear_detail::multiply_integers(iterations);
  return linear_detail::multiply_vectors(iterations);
}

void add(float* out, const float* in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] += in[i];
}

}  // namespace
}  // namespace serried
