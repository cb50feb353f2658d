// Activations in int8: groups of 32 columns, each with a scale and the sum of its values beside the row (see Dtype in
// kernels.hpp). One function quantizes for all operators, and no instruction set rounds differently, so a row has the
// same bits whatever wrote it.
#pragma once
#include "kernels.hpp"
#include "simd.hpp"

namespace serried {
namespace {
namespace simd {

constexpr int kGroupVectors = kGroup / kLanes;
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

#if SERRIED_LANES == 16
inline uint32_t largest_bits(U v) { return _mm512_reduce_max_epu32((__m512i)v); }
inline int32_t sum(I v) { return _mm512_reduce_add_epi32((__m512i)v); }
#else
inline uint32_t largest_bits(U v) {
  uint32_t top = v[0];
  for (int i = 1; i < kLanes; ++i) top = v[i] > top ? v[i] : top;
  return top;
}
inline int32_t sum(I v) {
  int32_t total = v[0];
  for (int i = 1; i < kLanes; ++i) total += v[i];
  return total;
}
#endif

// Magnitudes are compared as integers, where infinity and NaN are above all numbers: such a group gets values of zero
// and a scale of that, which makes the result NaN. A scale that would be a denormal is zero.
inline void quantize_group(const V (&x)[kGroupVectors], int8_t* values, float* scale, int32_t* total) {
  U magnitude = (U)x[0] & 0x7fffffffu;
  for (int j = 1; j < kGroupVectors; ++j) {
    const U other = (U)x[j] & 0x7fffffffu;
    magnitude = other > magnitude ? other : magnitude;
  }
  const uint32_t bits = largest_bits(magnitude);
  const float top = __builtin_bit_cast(float, bits);
  if (!(top >= 127 * 0x1p-126f) || bits >= 0x7f800000) {
    std::memset(values, 0, kGroup);
    *scale = bits >= 0x7f800000 ? top : 0.0f;
    *total = 0;
    return;
  }
  const V inverse = set(127.0f / top);
  I sums{};
  for (int j = 0; j < kGroupVectors; ++j) {
    const I q = (I)(x[j] * inverse + set(kMagic)) - (I)set(kMagic);  // to nearest even
    const Bytes bytes = __builtin_convertvector(q, Bytes);
    std::memcpy(values + j * kLanes, &bytes, sizeof bytes);
    sums += q;
  }
  *scale = top / 127.0f;
  *total = sum(sums);
}

// Where a row of kInt8 has its parts.
struct Int8Row {
  int8_t* values;
  float* scales;
  int32_t* sums;
  Int8Row(void* row, int64_t stride)
      : values(static_cast<int8_t*>(row)), scales(reinterpret_cast<float*>(values + stride)),
        sums(reinterpret_cast<int32_t*>(scales + stride / kGroup)) {}
};

// f(i) gives the vector of columns from i on, f(i, n) the last one, of n columns.
template <class F>
inline void write_int8_row(void* out, int64_t columns, int64_t stride, F f) {
  const Int8Row row(out, stride);
  for (int64_t group = 0, i = 0; i < stride; ++group, i += kGroup) {
    V x[kGroupVectors];
    for (int j = 0; j < kGroupVectors; ++j) {
      const int64_t at = i + j * kLanes;
      if (at + kLanes <= columns) {
        x[j] = f(at);
      } else if (at < columns) {
        const int n = static_cast<int>(columns - at);
        x[j] = iota() < n ? f(at, n) : V{};
      } else {
        x[j] = V{};
      }
    }
    quantize_group(x, row.values + i, row.scales + group, row.sums + group);
  }
}

}  // namespace simd
}  // namespace
}  // namespace serried
