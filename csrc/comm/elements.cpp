#include "comm/elements.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace serried {

namespace {

constexpr int64_t kBlock = 2048;  // elements summed at a time: the running sum stays in the level-1 cache

// Signed integers wrap as unsigned ones; the loops are plain so that the compiler makes vector code of them.
template <class T>
struct Wrapping {
  using Type = T;
};
template <>
struct Wrapping<int8_t> {
  using Type = uint8_t;
};
template <>
struct Wrapping<int32_t> {
  using Type = uint32_t;
};
template <>
struct Wrapping<int64_t> {
  using Type = uint64_t;
};

template <class T>
void add_to(T* __restrict out, const T* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(out[i] + in[i]);
}

template <class T>
void add_both(T* __restrict out, const T* __restrict a, const T* __restrict b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(a[i] + b[i]);
}

template <class Signed>
void sum_as(void* out, const void* const* sources, int count, int64_t n) {
  using T = typename Wrapping<Signed>::Type;
  const auto source = [&](int r) { return static_cast<const T*>(sources[r]); };
  T* total = static_cast<T*>(out);
  if (count == 1) {
    std::memcpy(out, sources[0], n * sizeof(T));
    return;
  }
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t m = std::min(kBlock, n - start);
    add_both(total + start, source(0) + start, source(1) + start, m);
    for (int r = 2; r < count; ++r) add_to(total + start, source(r) + start, m);
  }
}

template <class To, class From>
To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

float from_bf16(uint16_t x) { return bits<float>(static_cast<uint32_t>(x) << 16); }

uint16_t to_bf16(float x) {  // to nearest, ties to even; a NaN stays one
  const uint32_t u = bits<uint32_t>(x);
  const uint32_t rounded = u + 0x7fff + (u >> 16 & 1);
  return static_cast<uint16_t>((u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : rounded >> 16);
}

// float16 by integers: no instruction set is assumed, and it is not on a hot path.
float from_f16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, rest = x & 0x7fff;
  if (rest >= 0x7c00) return bits<float>(sign | 0x7f800000 | ((rest & 0x3ff) << 13));
  if (rest >= 0x400) return bits<float>(sign | ((rest << 13) + (112u << 23)));
  const float small = static_cast<float>(rest) * 0x1p-24f;
  return sign ? -small : small;
}

uint16_t to_f16(float x) {  // to nearest, ties to even
  const uint32_t u = bits<uint32_t>(x), magnitude = u & 0x7fffffff;
  const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above
  if (magnitude < 0x38800000) {  // below 2^-14: adding 1/2 leaves multiples of 2^-24 in the mantissa, rounded
    return static_cast<uint16_t>(sign | (bits<uint32_t>(bits<float>(magnitude) + 0.5f) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

void sum_halves(Element half, void* out, const void* const* sources, int count, int64_t n) {
  float total[kBlock], part[kBlock];
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t m = std::min(kBlock, n - start);
    for (int r = 0; r < count; ++r) {
      widen(half, static_cast<const uint16_t*>(sources[r]) + start, r ? part : total, m);
      if (r) add_to(total, part, m);
    }
    narrow(half, total, static_cast<uint16_t*>(out) + start, m);
  }
}

}  // namespace

size_t width(Element element) {
  switch (element) {
    case Element::kInt8: return 1;
    case Element::kBFloat16: case Element::kFloat16: return 2;
    case Element::kFloat32: case Element::kInt32: return 4;
    case Element::kInt64: return 8;
  }
  throw std::invalid_argument("no such element type");
}

void sum(Element element, void* out, const void* const* sources, int count, int64_t elements) {
  switch (element) {
    case Element::kFloat32: return sum_as<float>(out, sources, count, elements);
    case Element::kInt8: return sum_as<int8_t>(out, sources, count, elements);
    case Element::kInt32: return sum_as<int32_t>(out, sources, count, elements);
    case Element::kInt64: return sum_as<int64_t>(out, sources, count, elements);
    case Element::kBFloat16: case Element::kFloat16: return sum_halves(element, out, sources, count, elements);
  }
}

void add(Element element, void* out, const void* in, int64_t n) {
  switch (element) {
    case Element::kFloat32: return add_to(static_cast<float*>(out), static_cast<const float*>(in), n);
    case Element::kInt8: return add_to(static_cast<uint8_t*>(out), static_cast<const uint8_t*>(in), n);
    case Element::kInt32: return add_to(static_cast<uint32_t*>(out), static_cast<const uint32_t*>(in), n);
    case Element::kInt64: return add_to(static_cast<uint64_t*>(out), static_cast<const uint64_t*>(in), n);
    case Element::kBFloat16: case Element::kFloat16: throw std::invalid_argument("16-bit floats are added in float32");
  }
}

void widen(Element half, const void* in, float* out, int64_t n) {
  const uint16_t* x = static_cast<const uint16_t*>(in);
  if (half == Element::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) out[i] = from_bf16(x[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = from_f16(x[i]);
  }
}

void narrow(Element half, const float* in, void* out, int64_t n) {
  uint16_t* y = static_cast<uint16_t*>(out);
  if (half == Element::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) y[i] = to_bf16(in[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) y[i] = to_f16(in[i]);
  }
}

void fold_rows(const Fold& fold, const float* const* rows, float* out, int64_t columns, float* scratch,
               const float** values) {
  for (int64_t start = 0; start < columns; start += kFoldBlock) {
    const int64_t n = std::min(kFoldBlock, columns - start);
    for (int32_t i = 0; i < fold.rows; ++i) values[i] = rows[i] + start;
    for (int32_t p = 0; p < fold.pair_count; ++p) {
      const int32_t to = fold.pairs[2 * p], from = fold.pairs[2 * p + 1];
      const bool last = p == fold.pair_count - 1 && to == fold.result;
      float* place = last ? out + start : scratch + to * kFoldBlock;
      if (values[to] == place) {
        add_to(place, values[from], n);
      } else {
        add_both(place, values[to], values[from], n);
      }
      values[to] = place;
    }
    if (values[fold.result] != out + start) std::memcpy(out + start, values[fold.result], n * sizeof(float));
  }
}

}  // namespace serried
