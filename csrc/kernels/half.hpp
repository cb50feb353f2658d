// float16, as quantized weights keep their scales. No shortcut through float32 denormals: threads flush those.
#pragma once
#include <cstdint>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace serried {
namespace {

inline float half_value(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  if (exponent == 0) {
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -value : value;
  }
  const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return __builtin_bit_cast(float, sign | wide << 23 | mantissa << 13);
#endif
}

// To nearest even; too large: infinity; a NaN stays one.
inline uint16_t half_bits(float value) {
#if defined(__F16C__)
  return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
  const uint32_t bits = __builtin_bit_cast(uint32_t, value), magnitude = bits & 0x7fffffff;
  const uint32_t sign = (bits >> 16) & 0x8000;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 1023));
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and more
  uint32_t whole, rest, half;  // the result, what was cut off, and what half a unit of the result is of that
  if (magnitude >= 0x38800000) {
    whole = (magnitude - 0x38000000) >> 13, rest = magnitude & 0x1fff, half = 0x1000;
  } else {  // below 2^-14: a denormal, in units of 2^-24
    const uint32_t shift = 126 - (magnitude >> 23);
    if (shift > 25) return static_cast<uint16_t>(sign);
    const uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000;
    whole = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
  }
  whole += rest > half || (rest == half && (whole & 1));
  return static_cast<uint16_t>(sign | whole);
#endif
}

}  // namespace
}  // namespace serried
