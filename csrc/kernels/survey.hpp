// What a rank says of a row of logits when more than its best token may be needed: its likeliest tokens in order, and
// the parts of the sum over the vocabulary, by leaves of 64 that no edge between ranks cuts.
//
// The k-th largest of the leaves' maxima is a bound that at least k logits reach, so most leaves are never looked at
// again once they have been read. What is not a number counts as -inf.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels.hpp"
#include "pointwise.hpp"

namespace serried {
namespace {
namespace survey_parts {

constexpr int kLeaf = 64;

// Each leaf's largest logit; how many of all are above -inf.
inline int64_t leaf_maxima(const float* logits, int64_t n, float* maxima) {
  using namespace simd;
  const V lowest = set(-__builtin_inff());
  int64_t possible = 0;
  for (int64_t at = 0; at < n; at += kLeaf) {
    V top = lowest;
    I above{};
    for_columns(std::min<int64_t>(kLeaf, n - at), [&](int64_t i, auto... lanes) {
      V x = load(logits + at + i, lanes...);
      if constexpr (sizeof...(lanes) > 0) x = iota() < (lanes, ...) ? x : lowest;
      above -= x > lowest;
      top = max(x, top);
    });
    for (int j = 0; j < kLanes; ++j) possible += above[j];
    maxima[at / kLeaf] = largest(top);
  }
  return possible;
}

// e^x within 2 ulp for x in [-708, 0]; 0 below, and for NaN. Plain C++ without branches, for the compiler to widen.
inline void exp_all(const double* x, double* e) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: what is added to it loses its fraction
  double p[kLeaf];
  int64_t power[kLeaf];
  for (int i = 0; i < kLeaf; ++i) {
    const double t = x[i] * 1.4426950408889634 + kRound, k = t - kRound;
    const double r = (x[i] - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
    double q = 1.0 / 479001600;
    q = q * r + 1.0 / 39916800;
    q = q * r + 1.0 / 3628800;
    q = q * r + 1.0 / 362880;
    q = q * r + 1.0 / 40320;
    q = q * r + 1.0 / 5040;
    q = q * r + 1.0 / 720;
    q = q * r + 1.0 / 120;
    q = q * r + 1.0 / 24;
    q = q * r + 1.0 / 6;
    q = q * r + 0.5;
    q = q * r + 1.0;
    p[i] = q * r + 1.0;
    power[i] = std::bit_cast<int64_t>(t) << 52;
  }
  for (int i = 0; i < kLeaf; ++i) {
    const double y = std::bit_cast<double>(std::bit_cast<int64_t>(p[i]) + power[i]);
    e[i] = x[i] >= -708 ? y : 0;
  }
}

// The sum of exp((x - max) / divisor) over a leaf, halves added to each other: one order for every instruction set.
inline double leaf_sum(const float* logits, int n, float max, double inverse) {
  double x[kLeaf], e[kLeaf];
  for (int i = 0; i < kLeaf; ++i)
    x[i] = i < n ? (static_cast<double>(logits[i]) - static_cast<double>(max)) * inverse : -HUGE_VAL;
  exp_all(x, e);
  for (int width = kLeaf / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) e[i] += e[i + width];
  return e[0];
}

// The places of the `count` largest logits above -inf, in the order (logit down, place up); how many there are.
inline int64_t best(const float* logits, int64_t n, const std::vector<float>& maxima, int64_t count, int64_t* places) {
  float bound = -HUGE_VALF;
  if (count < static_cast<int64_t>(maxima.size())) {
    std::vector<float> order(maxima);
    std::nth_element(order.begin(), order.begin() + (count - 1), order.end(), std::greater<>());
    bound = order[static_cast<size_t>(count - 1)];
  }
  std::vector<int64_t> found;
  for (size_t leaf = 0; leaf < maxima.size(); ++leaf) {
    if (!(maxima[leaf] >= bound)) continue;
    const int64_t at = static_cast<int64_t>(leaf) * kLeaf;
    for (int64_t i = at; i < std::min(n, at + kLeaf); ++i)
      if (logits[i] >= bound && logits[i] > -HUGE_VALF) found.push_back(i);
  }
  const auto before = [&](int64_t a, int64_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
  const auto kept = std::min<int64_t>(count, static_cast<int64_t>(found.size()));
  std::partial_sort(found.begin(), found.begin() + kept, found.end(), before);
  std::copy_n(found.begin(), kept, places);
  return kept;
}

}  // namespace survey_parts

void survey(const float* logits, int64_t n, int64_t count, double divisor, SurveyRow* row) {
  using namespace survey_parts;
  std::vector<float> maxima(static_cast<size_t>((n + kLeaf - 1) / kLeaf));
  row->possible = leaf_maxima(logits, n, maxima.data());
  row->found = count > 0 ? best(logits, n, maxima, count, row->places) : 0;
  if (!row->leaf_sum) return;
  const double inverse = 1 / divisor;
  for (size_t leaf = 0; leaf < maxima.size(); ++leaf) {
    const int64_t at = static_cast<int64_t>(leaf) * kLeaf;
    const auto size = static_cast<int>(std::min<int64_t>(kLeaf, n - at));
    const bool empty = !(maxima[leaf] > -HUGE_VALF);
    row->leaf_max[leaf] = static_cast<double>(maxima[leaf]) / divisor;
    row->leaf_sum[leaf] = empty ? 0 : leaf_sum(logits + at, size, maxima[leaf], inverse);
  }
}

}  // namespace
}  // namespace serried
