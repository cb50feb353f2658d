// Operators on rows of float32: norms, folds, activations, rounding, and the two that sampling asks for.
#pragma once
#include "int8_rows.hpp"
#include "kernels.hpp"
#include "simd.hpp"
#include "softcap.hpp"

namespace serried {
namespace {
namespace simd {

// f(i) for whole vectors and f(i, n) for the last one, over [0, columns).
template <class F>
inline void for_columns(int64_t columns, F f) {
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) f(i);
  if (i < columns) f(i, static_cast<int>(columns - i));
}

template <class T>
inline void zero_padding(T* row, int64_t columns, int64_t stride) {
  std::memset(static_cast<void*>(row + columns), 0, sizeof(T) * static_cast<size_t>(stride - columns));
}

// The sum of squares. Vector i goes to accumulator i % 4: the order depends on the number of columns alone.
inline float sum_squares(const float* x, int64_t columns) {
  V acc[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= columns; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const V v = load(x + i + j * kLanes);
      acc[j] = fma(v, v, acc[j]);
    }
  }
  for (int j = 0; i < columns; ++j, i += kLanes) {
    const V v = i + kLanes <= columns ? load(x + i) : load(x + i, static_cast<int>(columns - i));
    acc[j] = fma(v, v, acc[j]);
  }
  return sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

inline float inverse_rms(const float* x, int64_t columns, float eps) {
  return 1.0f / __builtin_sqrtf(sum_squares(x, columns) / static_cast<float>(columns) + eps);
}

// Calls f with the place `offset` elements into an output of bf16 or float32, in its type.
template <class F>
inline void with_row(void* out, Dtype dtype, int64_t offset, F f) {
  if (dtype == Dtype::kBFloat16) return f(static_cast<Bf16*>(out) + offset);
  f(static_cast<float*>(out) + offset);
}

template <class T, class F>
inline void write_plain_row(T* row, int64_t columns, int64_t stride, F f) {
  for_columns(columns, [&](int64_t i, auto... n) { store(row + i, f(i, n...), n...); });
  zero_padding(row, columns, stride);
}

// Writes row `r` of an output, zero-padded to its stride. f(i) gives the vector of columns from i on, f(i, n) the last.
template <class F>
inline void write_row(void* out, Dtype dtype, int64_t r, int64_t columns, int64_t stride, F f) {
  void* row = static_cast<char*>(out) + r * row_bytes(dtype, stride);
  if (dtype == Dtype::kBFloat16) return write_plain_row(static_cast<Bf16*>(row), columns, stride, f);
  if (dtype == Dtype::kFloat32) return write_plain_row(static_cast<float*>(row), columns, stride, f);
  write_int8_row(row, columns, stride, f);
}

inline void norm_row(const float* x, const float* weight, float eps, int64_t columns, void* out, Dtype dtype, int64_t r,
                     int64_t out_stride) {
  const V scale = set(inverse_rms(x, columns, eps));
  write_row(out, dtype, r, columns, out_stride,
            [&](int64_t i, auto... n) { return load(x + i, n...) * scale * load(weight + i, n...); });
}

void norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t columns, void* out, Dtype out_dtype,
          int64_t out_stride, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) norm_row(x + r * x_stride, weight, eps, columns, out, out_dtype, r, out_stride);
}

constexpr int kMaxSlots = 128;

// The fold of one row, kWidth vectors of columns at a time in a local array; then f(column, value, lanes...).
template <int kWidth, class F, class... N>
inline void fold_columns(const ReduceAddNorm& op, const float* const* slots, int64_t offset, int64_t i, F f, N... n) {
  V value[kMaxSlots][kWidth];
  if (op.add_count == 0) {
    for (int w = 0; w < kWidth; ++w) value[op.result][w] = load(slots[op.result] + offset + i + w * kLanes, n...);
  } else {
    for (int s = 0; s < op.count; ++s)
      for (int w = 0; w < kWidth; ++w) value[s][w] = load(slots[s] + offset + i + w * kLanes, n...);
  }
  for (int a = 0; a < op.add_count; ++a) {
    const Add add = op.adds[a];
    for (int w = 0; w < kWidth; ++w) value[add.to][w] = value[add.to][w] + value[add.from][w];
  }
  for (int w = 0; w < kWidth; ++w) {
    V y = value[op.result][w];
    if (op.bias != nullptr) y = y + load(op.bias + i + w * kLanes, n...);
    f(i + w * kLanes, y, n...);
  }
}

template <class F>
void fold_row(const ReduceAddNorm& op, const float* const* slots, int64_t offset, F f) {
  constexpr int kWidth = 4;
  int64_t i = 0;
  for (; i + kWidth * kLanes <= op.columns; i += kWidth * kLanes) fold_columns<kWidth>(op, slots, offset, i, f);
  for (; i + kLanes <= op.columns; i += kLanes) fold_columns<1>(op, slots, offset, i, f);
  if (i < op.columns) fold_columns<1>(op, slots, offset, i, f, static_cast<int>(op.columns - i));
}

void reduce_add_norm(const ReduceAddNorm& op, const float* const* slots, int64_t slot_stride, float* residual,
                     int64_t residual_stride, void* out, Dtype out_dtype, int64_t out_stride, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    float* own = residual + r * residual_stride;
    fold_row(op, slots, r * slot_stride,
             [own](int64_t i, V y, auto... n) { store(own + i, load(own + i, n...) + y, n...); });
    if (op.weight) norm_row(own, op.weight, op.eps, op.columns, out, out_dtype, r, out_stride);
  }
}

void fold(const ReduceAddNorm& op, const float* const* slots, int64_t slot_stride, float* out, int64_t out_stride,
          int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    float* own = out + r * out_stride;
    fold_row(op, slots, r * slot_stride, [own](int64_t i, V y, auto... n) { store(own + i, y, n...); });
  }
}

void norm_add_norm(const float* x, int64_t x_stride, const float* inner, float* residual, int64_t residual_stride,
                   const float* weight, float eps, int64_t columns, void* out, Dtype out_dtype, int64_t out_stride,
                   int64_t rows) {
  for (int64_t r = 0; r < rows; ++r, x += x_stride, residual += residual_stride) {
    const V scale = set(inverse_rms(x, columns, eps));
    for_columns(columns, [&](int64_t i, auto... n) {
      store(residual + i, load(residual + i, n...) + load(x + i, n...) * scale * load(inner + i, n...), n...);
    });
    norm_row(residual, weight, eps, columns, out, out_dtype, r, out_stride);
  }
}

struct Silu {
  static V of(V x) { return x / (set(1.0f) + exp(-x)); }
};

// x * Phi(x), by erfc(z) = t exp(-z^2 + P(t)), t = 1 / (1 + z / 2): a relative error of about 1e-6 on both sides.
struct Gelu {
  static V of(V x) {
    const V z = max(-x, x) * set(0.70710678118654752f);
    const V t = set(1.0f) / fma(set(0.5f), z, set(1.0f));
    V p = fma(set(0.17087277f), t, set(-0.82215223f));
    p = fma(p, t, set(1.48851587f));
    p = fma(p, t, set(-1.13520398f));
    p = fma(p, t, set(0.27886807f));
    p = fma(p, t, set(-0.18628806f));
    p = fma(p, t, set(0.09678418f));
    p = fma(p, t, set(0.37409196f));
    p = fma(p, t, set(1.00002368f));
    p = fma(p, t, set(-1.26551223f));
    const V half = set(0.5f) * t * exp(fma(-z, z, p));  // erfc(z) / 2 = Phi(-|x|)
    return x * (x > V{} ? set(1.0f) - half : half);
  }
};

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  static V of(V x) {
    const V u = x * fma(x * x, set(0.044715f), set(1.0f));
    return x / (set(1.0f) + exp(u * set(-1.5957691216057308f)));
  }
};

template <class F>
inline void with_activation(Activation activation, F f) {
  if (activation == Activation::kSilu) return f(Silu{});
  if (activation == Activation::kGelu) return f(Gelu{});
  f(GeluTanh{});
}

void gated(Activation activation, const float* gate, const float* up, int64_t in_stride, void* out, Dtype out_dtype,
           int64_t columns, int64_t out_stride, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r, gate += in_stride, up += in_stride) {
    with_activation(activation, [&](auto act) {
      write_row(out, out_dtype, r, columns, out_stride,
                [&](int64_t i, auto... n) { return act.of(load(gate + i, n...)) * load(up + i, n...); });
    });
  }
}

void activate(Activation activation, float* x, int64_t n) {
  with_activation(activation, [&](auto act) {
    for_columns(n, [&](int64_t i, auto... lanes) { store(x + i, act.of(load(x + i, lanes...)), lanes...); });
  });
}

void softcap(float value, float* x, int64_t n) {
  const Cap cap(value);
  for_columns(n, [&](int64_t i, auto... lanes) { store(x + i, cap.of(load(x + i, lanes...)), lanes...); });
}

template <class T>
inline void round_from(const T* x, int64_t x_stride, void* out, Dtype out_dtype, int64_t columns, int64_t out_stride,
                       int64_t rows) {
  for (int64_t r = 0; r < rows; ++r, x += x_stride)
    write_row(out, out_dtype, r, columns, out_stride, [x](int64_t i, auto... n) { return load(x + i, n...); });
}

void round_rows(const void* x, Dtype x_dtype, int64_t x_stride, void* out, Dtype out_dtype, int64_t columns,
                int64_t out_stride, int64_t rows) {
  if (x_dtype == Dtype::kBFloat16)
    return round_from(static_cast<const Bf16*>(x), x_stride, out, out_dtype, columns, out_stride, rows);
  round_from(static_cast<const float*>(x), x_stride, out, out_dtype, columns, out_stride, rows);
}

// Each lane keeps the first of its largest, then the lanes are compared; lanes beyond n stay at -inf.
void argmax(const float* logits, int64_t n, int64_t* index, float* value) {
  const V lowest = set(-__builtin_inff());
  V best = lowest;
  I best_at = iota();
  for_columns(n, [&](int64_t i, auto... lanes) {
    const I at = iota() + static_cast<int32_t>(i);
    const V x = load(logits + i, lanes...);
    const I better = (x > best) & (at < static_cast<int32_t>(n));  // false for NaN
    best = better ? x : best;
    best_at = better ? at : best_at;
  });
  int lane = 0;
  for (int j = 1; j < kLanes; ++j) {
    if (best[j] > best[lane] || (best[j] == best[lane] && best_at[j] < best_at[lane])) lane = j;
  }
  *index = best_at[lane];
  *value = best[lane];
}

}  // namespace simd

using simd::activate;
using simd::argmax;
using simd::fold;
using simd::gated;
using simd::norm;
using simd::norm_add_norm;
using simd::reduce_add_norm;
using simd::round_rows;
using simd::softcap;

}  // namespace
}  // namespace serried
