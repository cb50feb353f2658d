// The soft cap of scores and of logits: cap * tanh(x / cap).
#pragma once
#include "simd.hpp"

namespace serried {
namespace {
namespace simd {

// tanh within 2 ulp; NaN stays NaN. Cephes' polynomial near 0, where 1 - 2 / (e^2x + 1) would lose small x.
inline V tanh(V x) {
  const V z = max(x, -x), square = x * x;
  V p = fma(set(-5.70498872745e-3f), square, set(2.06390887954e-2f));
  p = fma(p, square, set(-5.37397155531e-2f));
  p = fma(p, square, set(1.33314422036e-1f));
  p = fma(p, square, set(-3.33332819422e-1f));
  const V small = fma(p * square, x, x);
  const V large = set(1.0f) - set(2.0f) / (exp(z + z) + set(1.0f));
  return z > set(0.625f) ? (x > V{} ? large : -large) : small;
}

struct Cap {
  V cap;
  explicit Cap(float value) : cap(set(value)) {}
  V of(V x) const { return cap * tanh(x / cap); }
};

}  // namespace simd
}  // namespace
}  // namespace serried
