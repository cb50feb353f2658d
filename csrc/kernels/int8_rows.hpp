// Activations in int8: groups of 32 columns, each with a scale and the sum of its values beside the row, and with two
// bits more where it has outliers (see Dtype in kernels.hpp). One function quantizes for all operators, and no instruction set rounds differently, so a row has the
// same bits whatever wrote it.
#pragma once
#include "int8_row.hpp"
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

struct OutRow : Int8Row<char> {
  using Int8Row::Int8Row;
  void set(int64_t group, float scale, int32_t sum, bool is_fine) const {
    scales[group] = scale;
    sums[group] = sum;
    fine[group] = is_fine;
  }
};

inline void put_bytes(int8_t* to, I values) {
  const Bytes bytes = __builtin_convertvector(values, Bytes);
  std::memcpy(to, &bytes, sizeof bytes);
}

// q = x * factor, to nearest even; gives the sum of their squares, which are integers that float32 holds exactly.
inline float round_group(const V (&x)[kGroupVectors], float factor, I (&q)[kGroupVectors]) {
  V squares{};
  for (int j = 0; j < kGroupVectors; ++j) {
    const V shifted = x[j] * set(factor) + set(kMagic), value = shifted - set(kMagic);
    q[j] = (I)shifted - (I)set(kMagic);
    squares = squares + value * value;
  }
  return sum(squares);
}

inline int32_t sum(const I (&q)[kGroupVectors]) {
  I sums{};
  for (int j = 0; j < kGroupVectors; ++j) sums += q[j];
  return sum(sums);
}

// Magnitudes are compared as integers, where infinity and NaN are above all numbers: such a group gets values of zero
// and a scale of that, which makes the result NaN. A scale that would be a denormal is zero.
inline void quantize_group(const V (&x)[kGroupVectors], const OutRow& row, int64_t group) {
  U magnitude = (U)x[0] & 0x7fffffffu;
  for (int j = 1; j < kGroupVectors; ++j) {
    const U other = (U)x[j] & 0x7fffffffu;
    magnitude = other > magnitude ? other : magnitude;
  }
  const uint32_t bits = largest_bits(magnitude);
  const float top = __builtin_bit_cast(float, bits);
  int8_t *high = row.high + group * kGroup, *low = row.low + group * kGroup;
  if (!(top >= 127 * kFineSteps * 0x1p-126f) || bits >= 0x7f800000) {
    std::memset(high, 0, kGroup);
    return row.set(group, bits >= 0x7f800000 ? top : 0.0f, 0, false);
  }
  I q[kGroupVectors];
  if (round_group(x, 127.0f / top, q) >= kFineSquares) {
    for (int j = 0; j < kGroupVectors; ++j) put_bytes(high + j * kLanes, q[j]);
    return row.set(group, top / 127.0f, sum(q), false);
  }
  constexpr float kMost = 127.0f * kFineSteps;
  round_group(x, kMost / top, q);
  for (int j = 0; j < kGroupVectors; ++j) {
    const I rounded = (q[j] + kFineSteps / 2) >> 3;
    put_bytes(high + j * kLanes, rounded);
    put_bytes(low + j * kLanes, q[j] - rounded * kFineSteps);
  }
  row.set(group, top / kMost, sum(q), true);
}

// f(i) gives the vector of columns from i on, f(i, n) the last one, of n columns.
template <class F>
inline void write_int8_row(void* out, int64_t columns, int64_t stride, F f) {
  const OutRow row(static_cast<char*>(out), stride);
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
    quantize_group(x, row, group);
  }
}

}  // namespace simd
}  // namespace
}  // namespace serried
