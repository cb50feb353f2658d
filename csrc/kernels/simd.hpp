// A thin vector of float32: 4 lanes of GCC/Clang's portable vectors (baseline, ARM too), 8 (AVX2) or 16 (AVX-512).
// The type is the compiler's own, so + - * / and comparisons are its operators; -ffp-contract=off keeps them apart.
// A tail is the same code with fewer lanes loaded and stored (`n`): an element's bits never depend on where it lies.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(SERRIED_avx512) || defined(SERRIED_avx512_bf16) || defined(SERRIED_amx)
#define SERRIED_LANES 16
#elif defined(SERRIED_avx2) || defined(SERRIED_avx2_vnni)
#define SERRIED_LANES 8
#else
#define SERRIED_LANES 4
#endif
#if defined(SERRIED_avx512_bf16) || defined(SERRIED_amx)
#define SERRIED_DOT_PAIRS 1
#else
#define SERRIED_DOT_PAIRS 0
#endif
#if SERRIED_LANES > 4
// GCC 12 warns of the "undefined" operand in its own header (PR105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace serried {
namespace {
namespace simd {

constexpr int kLanes = SERRIED_LANES;
constexpr bool kHasDotPairs = SERRIED_DOT_PAIRS;

struct Bf16 {
  uint16_t bits;
};

typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
#if SERRIED_LANES == 16
typedef __m512 V;
#elif SERRIED_LANES == 8
typedef __m256 V;
#else
typedef float V __attribute__((vector_size(4 * kLanes)));
#endif
typedef float UnalignedV __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t UnalignedU __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));

// Constants, whole loads and stores.

inline V set(float x) {
#if SERRIED_LANES == 16
  return _mm512_set1_ps(x);
#elif SERRIED_LANES == 8
  return _mm256_set1_ps(x);
#else
  return V{x, x, x, x};
#endif
}
inline U set_bits(uint32_t x) { return U{} + x; }
inline V load(const float* p) { return *reinterpret_cast<const UnalignedV*>(p); }
inline void store(float* p, V v) { *reinterpret_cast<UnalignedV*>(p) = v; }
inline U load_bits(const void* p) { return *static_cast<const UnalignedU*>(p); }
inline void store_bits(void* p, U v) { *static_cast<UnalignedU*>(p) = v; }
// 0, 1, 2, ...
inline I iota() {
  I result;
  for (int i = 0; i < kLanes; ++i) result[i] = i;
  return result;
}

// The first n lanes (0 < n < kLanes); the others are zero, and their memory is not touched.

#if SERRIED_LANES == 16
inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline V load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store(float* p, V v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
inline U load_bits(const void* p, int n) { return (U)_mm512_maskz_loadu_epi32(first(n), p); }
inline void store_bits(void* p, U v, int n) { _mm512_mask_storeu_epi32(p, first(n), (__m512i)v); }
#elif SERRIED_LANES == 8
inline __m256i first(int n) { return (__m256i)(iota() < n); }
inline V load(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
inline void store(float* p, V v, int n) { _mm256_maskstore_ps(p, first(n), v); }
inline U load_bits(const void* p, int n) { return (U)_mm256_maskload_epi32(static_cast<const int*>(p), first(n)); }
inline void store_bits(void* p, U v, int n) { _mm256_maskstore_epi32(static_cast<int*>(p), first(n), (__m256i)v); }
#else
inline U load_bits(const void* p, int n) {
  U v{};
  std::memcpy(&v, p, 4 * static_cast<size_t>(n));
  return v;
}
inline void store_bits(void* p, U v, int n) { std::memcpy(p, &v, 4 * static_cast<size_t>(n)); }
inline V load(const float* p, int n) { return (V)load_bits(p, n); }
inline void store(float* p, V v, int n) { store_bits(p, (U)v, n); }
#endif

// Arithmetic. max and min give b where either is NaN, as on x86; the baseline's fma rounds twice.

#if SERRIED_LANES == 16
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline float sum(__m256 h) {
  const __m128 q = _mm256_castps256_ps128(h) + _mm256_extractf128_ps(h, 1);
  const __m128 d = q + _mm_movehl_ps(q, q);
  return d[0] + d[1];
}
inline float largest(__m256 h) {
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return d[0] > d[1] ? d[0] : d[1];
}
inline float sum(V v) { return sum(_mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1)); }
inline float largest(V v) { return largest(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))); }
#elif SERRIED_LANES == 8
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return _mm256_max_ps(a, b); }
inline V min(V a, V b) { return _mm256_min_ps(a, b); }
inline float sum(V h) {
  const __m128 q = _mm256_castps256_ps128(h) + _mm256_extractf128_ps(h, 1);
  const __m128 d = q + _mm_movehl_ps(q, q);
  return d[0] + d[1];
}
inline float largest(V h) {
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return d[0] > d[1] ? d[0] : d[1];
}
#else
inline V fma(V a, V b, V c) { return a * b + c; }
inline V max(V a, V b) { return a > b ? a : b; }
inline V min(V a, V b) { return a < b ? a : b; }
inline float sum(V v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float largest(V v) {
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}
#endif

// bf16: widening is exact; narrowing is to nearest even, NaN stays NaN. The result is in the upper half of each lane.
inline U round_bits(V v) {
  const U u = (U)v;
  const U rounded = u + 0x7fffu + ((u >> 16) & 1u);
  return v != v ? u | 0x400000u : rounded;
}

inline V load(const Bf16* p) {
#if SERRIED_LANES == 16
  return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#elif SERRIED_LANES == 8
  return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
  return (V)(U{p[0].bits, p[1].bits, p[2].bits, p[3].bits} << 16);
#endif
}
inline void store(Bf16* p, V v) {
  const U u = round_bits(v) >> 16;
#if SERRIED_LANES == 16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)u));
#elif SERRIED_LANES == 8
  const __m128i low = _mm256_castsi256_si128((__m256i)u), high = _mm256_extracti128_si256((__m256i)u, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(low, high));
#else
  for (int i = 0; i < kLanes; ++i) p[i].bits = static_cast<uint16_t>(u[i]);
#endif
}
inline V load(const Bf16* p, int n) {
  Bf16 copy[kLanes] = {};
  std::memcpy(copy, p, sizeof(Bf16) * static_cast<size_t>(n));
  return load(copy);
}
inline void store(Bf16* p, V v, int n) {
#if SERRIED_LANES == 16
  _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16((__m512i)(round_bits(v) >> 16)));
#else
  Bf16 copy[kLanes];
  store(copy, v);
  std::memcpy(p, copy, sizeof(Bf16) * static_cast<size_t>(n));
#endif
}

// Two vectors that stand for 2 * kLanes neighbours in memory, the cheapest way for the dtype: bf16 as even and odd
// elements (a shift and a mask), float32 as first and second half. n: neighbours, even, at most 2 * kLanes.
struct Pair {
  V a, b;
};
constexpr int kPair = 2 * kLanes;

inline Pair split(U u) { return {(V)(u << 16), (V)(u & 0xffff0000u)}; }
inline Pair load_pair(const Bf16* p) { return split(load_bits(p)); }
inline Pair load_pair(const Bf16* p, int n) { return split(load_bits(p, n / 2)); }
inline Pair load_pair(const float* p) { return {load(p), load(p + kLanes)}; }
inline Pair load_pair(const float* p, int n) {
  if (n < kLanes) return {load(p, n), V{}};
  return {load(p), n > kLanes ? load(p + kLanes, n - kLanes) : V{}};
}
inline void store_pair(Bf16* p, Pair x, int n) {
  const U u = (round_bits(x.a) >> 16) | (round_bits(x.b) & 0xffff0000u);
  n == kPair ? store_bits(p, u) : store_bits(p, u, n / 2);
}
inline void store_pair(float* p, Pair x, int n) {
  n < kLanes ? store(p, x.a, n) : store(p, x.a);
  if (n == kPair) return store(p + kLanes, x.b);
  if (n > kLanes) store(p + kLanes, x.b, n - kLanes);
}

// p * 2^n for an integral n = t - kMagic; t holds it in its low bits too.
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
inline V scale_by_power(V p, V t) {
#if SERRIED_LANES == 16
  return _mm512_scalef_ps(p, t - set(kMagic));
#else
  const I n = (I)t - (I)set(kMagic), half = n >> 1;  // two factors: 2^128 is none
  return p * (V)((half + 127) << 23) * (V)((n - half + 127) << 23);
#endif
}

// e^x within 2 ulp; below ln(2^-126) exactly 0, above ln(max) inf; NaN stays NaN. Cephes' polynomial.
inline V exp(V x) {
  const V t = fma(x, set(1.44269504088896341f), set(kMagic)), n = t - set(kMagic);
  V r = fma(n, set(-0.693359375f), x);
  r = fma(n, set(2.12194440e-4f), r);
  V p = fma(set(1.9875691500e-4f), r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  p = fma(p, r * r, r) + set(1.0f);
  p = scale_by_power(p, t);
  p = x > set(88.722839f) ? set(__builtin_inff()) : p;
  return x < set(-87.336544f) ? V{} : p;
}

// e^x of one number, by the same code.
inline float exp_one(float x) { return exp(set(x))[0]; }

}  // namespace simd
}  // namespace
}  // namespace serried
