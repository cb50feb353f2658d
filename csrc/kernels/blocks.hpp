// The blocks of GGML that quantized weights come in (see kernels.hpp): made from floats, and copied into tiles.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "half.hpp"
#include "kernels.hpp"

namespace serried {
namespace {
namespace blocks {

// A block: scales first, then the values of 32 k.
struct Shape {
  int64_t bytes;   // of a block
  int64_t scales;  // bytes of its scale and minimum
  int units;       // of 4 bytes, that its values have
};
constexpr Shape shape_of(Format format) {
  if (format == Format::kInt8) return {34, 2, 8};
  if (format == Format::kInt4) return {18, 2, 4};
  return {20, 4, 4};
}

inline void put_half(uint8_t* at, float value) {
  const uint16_t bits = half_bits(value);
  std::memcpy(at, &bits, 2);
}
inline float get_half(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return half_value(bits);
}

// ---- Quantization, as ggml's reference does it ----

inline float inverse(float scale) {
  const float result = 1.0f / scale;
  return scale == 0.0f || result - result != 0.0f ? 0.0f : result;
}

// The largest magnitude, as bits: infinity and NaN are above all numbers.
inline uint32_t largest_bits(const float* x) {
  uint32_t bits[kGroup], top = 0;
  std::memcpy(bits, x, sizeof bits);
  for (int i = 0; i < kGroup; ++i) top = std::max(top, bits[i] & 0x7fffffffu);
  return top;
}

// scale = largest magnitude / 127; values are rounded half away from zero.
inline void quantize_q8_0(const float* x, uint8_t* block) {
  const float scale = __builtin_bit_cast(float, largest_bits(x)) / 127.0f, factor = inverse(scale);
  put_half(block, scale);
  for (int i = 0; i < kGroup; ++i) {
    const float value = x[i] * factor, magnitude = value < 0 ? -value : value;
    const int32_t whole = magnitude < 127.0f ? static_cast<int32_t>(magnitude) : 127;  // NaN: 127
    const int32_t rounded = whole + (magnitude - static_cast<float>(whole) >= 0.5f);
    block[2 + i] = static_cast<uint8_t>(value < 0 ? -rounded : rounded);
  }
}

// To a half byte: truncated, at most 15; NaN: 15.
inline uint8_t nibble(float value) { return static_cast<uint8_t>(value < 15.0f ? std::max(value, 0.0f) : 15.0f); }

inline void put_nibbles(const uint8_t* q, uint8_t* to) {
  for (int i = 0; i < kGroup / 2; ++i) to[i] = static_cast<uint8_t>(q[i] | q[i + kGroup / 2] << 4);
}

// scale = what is largest in magnitude (the first such), with its sign, / -8.
inline void quantize_q4_0(const float* x, uint8_t* block) {
  const uint32_t top = largest_bits(x);
  int at = 0;
  while ((__builtin_bit_cast(uint32_t, x[at]) & 0x7fffffffu) != top) ++at;
  const float scale = x[at] / -8.0f, factor = inverse(scale);
  uint8_t q[kGroup];
  for (int i = 0; i < kGroup; ++i) q[i] = nibble(x[i] * factor + 8.5f);
  put_half(block, scale);
  put_nibbles(q, block + 2);
}

// scale = (maximum - minimum) / 15.
inline void quantize_q4_1(const float* x, uint8_t* block) {
  float low = x[0], high = x[0];
  for (int i = 1; i < kGroup; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  const float scale = (high - low) / 15.0f, factor = inverse(scale);
  uint8_t q[kGroup];
  for (int i = 0; i < kGroup; ++i) q[i] = nibble((x[i] - low) * factor + 0.5f);
  put_half(block, scale);
  put_half(block + 2, low);
  put_nibbles(q, block + 4);
}

inline float as_float(float value) { return value; }
inline float as_float(uint16_t bits) { return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16); }

template <class From>
void quantize_rows(Format format, const From* source, int64_t rows, int64_t columns, int64_t stride, uint8_t* blocks,
                   int64_t block_stride) {
  const int64_t bytes = shape_of(format).bytes;
  for (int64_t r = 0; r < rows; ++r, source += stride, blocks += block_stride) {
    uint8_t* to = blocks;
    for (int64_t k = 0; k < columns; k += kGroup, to += bytes) {
      alignas(64) float x[kGroup] = {};
      const int count = static_cast<int>(std::min<int64_t>(kGroup, columns - k));
      for (int i = 0; i < count; ++i) x[i] = as_float(source[k + i]);
      if (format == Format::kInt8) quantize_q8_0(x, to);
      else if (format == Format::kInt4) quantize_q4_0(x, to);
      else quantize_q4_1(x, to);
    }
  }
}

// ---- Tiles ----

// One block, as output `o` of a group of a tile. Values of int8 become unsigned.
template <int kUnits, int kScales>
inline void pack_block(const uint8_t* block, uint8_t* group, int o) {
  for (int f = 0; f < kUnits; ++f) {
    uint32_t unit;
    std::memcpy(&unit, block + kScales + 4 * f, 4);
    if (kUnits == 8) unit ^= 0x80808080u;
    std::memcpy(group + (f * kTile + o) * 4, &unit, 4);
  }
  for (int s = 0; s < kScales; s += 2) std::memcpy(group + kUnits * kTile * 4 + s * kTile + 2 * o, block + s, 2);
}

template <int kUnits, int kScales>
void pack_rows(uint8_t* tiles, int32_t inputs, int64_t row, int64_t rows, const uint8_t* blocks, int64_t block_count,
               int64_t block_stride) {
  constexpr int64_t kGroupBytes = kTile * (4 * kUnits + kScales), kBlockBytes = 4 * kUnits + kScales;
  const int64_t groups = inputs / kGroup;
  for (const int64_t end = row + rows; row < end;) {
    const int64_t first = row % kTile, count = std::min(kTile - first, end - row);
    uint8_t* tile = tiles + row / kTile * groups * kGroupBytes;
    for (int64_t g = 0; g < block_count; ++g) {
      for (int64_t r = 0; r < count; ++r)
        pack_block<kUnits, kScales>(blocks + r * block_stride + g * kBlockBytes, tile + g * kGroupBytes,
                                    static_cast<int>(first + r));
    }
    blocks += count * block_stride;
    row += count;
  }
}

// Row `row` as float32: scale * (q - offset), or scale * q + minimum.
inline void unpack(const uint8_t* tiles, Format format, int32_t inputs, int64_t row, float* out, int64_t columns) {
  const Shape shape = shape_of(format);
  const int64_t group_bytes = kTile * shape.bytes, o = row % kTile;
  const uint8_t* group = tiles + row / kTile * (inputs / kGroup) * group_bytes;
  for (int64_t k = 0; k < columns; k += kGroup, group += group_bytes) {
    const uint8_t* scales = group + int64_t{shape.units} * kTile * 4 + 2 * o;
    const float scale = get_half(scales), minimum = shape.scales == 4 ? get_half(scales + 2 * kTile) : 0.0f;
    const int count = static_cast<int>(std::min<int64_t>(kGroup, columns - k));
    for (int i = 0; i < count; ++i) {
      const int at = i % (4 * shape.units);
      const int byte = group[(at / 4 * kTile + o) * 4 + at % 4];
      const int q = format == Format::kInt8 ? byte - 128 : at == i ? byte & 15 : byte >> 4;
      out[k + i] = format == Format::kInt4Min ? scale * static_cast<float>(q) + minimum
                                              : scale * static_cast<float>(format == Format::kInt4 ? q - 8 : q);
    }
  }
}

// ---- Q4_K: float16 d and dmin; 6 bits of scale and of minimum for each 32 values, in 12 bytes; 128 bytes of values,
// of each 32 bytes the low halves first ----

inline void repack_superblock(const uint8_t* from, uint8_t* to) {
  const float scale = get_half(from), minimum = get_half(from + 2);
  const uint8_t *packed = from + 4, *values = from + 16;
  for (int j = 0; j < 8; ++j, to += 20) {
    const int s = j < 4 ? packed[j] & 63 : (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
    const int m = j < 4 ? packed[j + 4] & 63 : packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
    put_half(to, scale * static_cast<float>(s));
    put_half(to + 2, -(minimum * static_cast<float>(m)));
    uint8_t q[kGroup];
    for (int i = 0; i < kGroup; ++i) q[i] = static_cast<uint8_t>(values[j / 2 * 32 + i] >> 4 * (j % 2) & 15);
    put_nibbles(q, to + 4);
  }
}

}  // namespace blocks

void quantize(Format format, const void* source, Dtype from, int64_t rows, int64_t columns, int64_t source_stride,
              void* to, int64_t block_stride) {
  auto* bytes = static_cast<uint8_t*>(to);
  if (from == Dtype::kBFloat16) {
    const auto* halves = static_cast<const uint16_t*>(source);
    return blocks::quantize_rows(format, halves, rows, columns, source_stride, bytes, block_stride);
  }
  blocks::quantize_rows(format, static_cast<const float*>(source), rows, columns, source_stride, bytes, block_stride);
}

void pack_blocks(void* tiles, Format format, int32_t inputs, int64_t row, int64_t rows, const void* from,
                 int64_t block_count, int64_t block_stride) {
  auto* to = static_cast<uint8_t*>(tiles);
  const auto* bytes = static_cast<const uint8_t*>(from);
  if (format == Format::kInt8) return blocks::pack_rows<8, 2>(to, inputs, row, rows, bytes, block_count, block_stride);
  if (format == Format::kInt4) return blocks::pack_rows<4, 2>(to, inputs, row, rows, bytes, block_count, block_stride);
  blocks::pack_rows<4, 4>(to, inputs, row, rows, bytes, block_count, block_stride);
}

void repack_q4_k(const void* source, int64_t source_stride, int64_t rows, int64_t superblocks, void* to,
                 int64_t block_stride) {
  constexpr int64_t kFrom = 144, kTo = 8 * 20;
  const auto* from = static_cast<const uint8_t*>(source);
  auto* bytes = static_cast<uint8_t*>(to);
  for (int64_t r = 0; r < rows; ++r, from += source_stride, bytes += block_stride) {
    for (int64_t b = 0; b < superblocks; ++b) blocks::repack_superblock(from + b * kFrom, bytes + b * kTo);
  }
}

}  // namespace
}  // namespace serried
