// Gumbel-max over a rank's logits: the argmax of logit / temperature + noise, noise by Philox4x32-10 from (seed, sample,
// position, token id) alone; see serried/backends/philox.py, whose numbers these are.
//
// Few tokens can win: noise is a monotonic function of 32 random bits, so a token that is d below the best score so far
// needs bits of at least a known threshold. A table of thresholds (rounded down) sorts nearly all tokens out by one
// comparison, and only the rest pay for logarithms.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "kernels.hpp"

namespace serried {
namespace {
namespace sampling {

constexpr int kCounters = 64;        // made at once; four tokens each
constexpr int kStepsPerUnit = 16;    // of the threshold table
constexpr int kTableUnits = 24;      // no noise exceeds 22.9
constexpr float kMargin = 1.0F / 8;  // more than the rounding of what is compared in float32

inline double noise_of(uint32_t bits) {
  const double uniform = (static_cast<double>(bits) + 0.5) * 0x1p-32;
  return -std::log(-std::log(uniform));
}

// bits[c * 4 + w]: word w of counter first + c. Counters side by side, so that the compiler makes vectors of them.
template <int kCounters>
void philox(uint64_t seed, uint64_t first, uint32_t position, uint32_t sample, uint32_t* bits) {
  uint64_t c0[kCounters], c1[kCounters], c2[kCounters], c3[kCounters];
  for (int i = 0; i < kCounters; ++i) {
    c0[i] = (first + static_cast<uint64_t>(i)) & 0xffffffffU;
    c1[i] = position, c2[i] = sample, c3[i] = 0;
  }
  uint64_t k0 = seed & 0xffffffffU, k1 = seed >> 32;
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kCounters; ++i) {
      const uint64_t p0 = 0xD2511F53U * c0[i], p1 = 0xCD9E8D57U * c2[i];
      c0[i] = (p1 >> 32) ^ c1[i] ^ k0;
      c2[i] = (p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = p1 & 0xffffffffU;
      c3[i] = p0 & 0xffffffffU;
    }
    k0 = (k0 + 0x9E3779B9U) & 0xffffffffU, k1 = (k1 + 0xBB67AE85U) & 0xffffffffU;
  }
  for (int i = 0; i < kCounters; ++i) {
    bits[4 * i] = static_cast<uint32_t>(c0[i]), bits[4 * i + 1] = static_cast<uint32_t>(c1[i]);
    bits[4 * i + 2] = static_cast<uint32_t>(c2[i]), bits[4 * i + 3] = static_cast<uint32_t>(c3[i]);
  }
}

// The least bits whose noise reaches d = i / kStepsPerUnit (and so any larger d), rounded down a little.
inline std::array<uint32_t, kTableUnits * kStepsPerUnit + 1> thresholds() {
  std::array<uint32_t, kTableUnits * kStepsPerUnit + 1> table{};
  for (size_t i = 0; i < table.size(); ++i) {
    const double d = static_cast<double>(i) / kStepsPerUnit;
    const double bits = std::exp(-std::exp(-d)) * 0x1p32 - 2;
    table[i] = static_cast<uint32_t>(std::clamp(bits, 0.0, 4294967295.0));
  }
  return table;
}

struct Best {
  int64_t index;
  double score;
};

}  // namespace sampling

void gumbel_argmax(const float* logits, int64_t n, int64_t first_id, double temperature, uint64_t seed,
                   uint32_t position, int64_t* index, double* score) {
  using namespace sampling;
  static const auto table = thresholds();
  int64_t top;
  float value;
  argmax(logits, n, &top, &value);
  Best best{-1, -HUGE_VAL};
  alignas(64) uint32_t bits[4 * kCounters];
  const auto consider = [&](int64_t i, uint32_t word) {
    const double s = static_cast<double>(logits[i]) / temperature + noise_of(word);
    if (s > best.score || (s == best.score && i < best.index)) best = {i, s};
  };
  // The likeliest token first: its score is a good bound for all others.
  philox<1>(seed, static_cast<uint64_t>(first_id + top) / 4, position, 0, bits);
  consider(top, bits[(first_id + top) % 4]);
  const auto inverse = static_cast<float>(1.0 / temperature);
  for (int64_t id = first_id / 4 * 4; id < first_id + n; id += 4 * kCounters) {
    philox<kCounters>(seed, static_cast<uint64_t>(id) / 4, position, 0, bits);
    const int64_t begin = std::max(id, first_id), end = std::min(id + 4 * kCounters, first_id + n);
    for (int64_t at = begin; at < end; ++at) {
      const float slack = std::abs(static_cast<float>(best.score)) * 1e-5F + kMargin;
      const float d = (static_cast<float>(best.score) - logits[at - first_id] * inverse - slack) * kStepsPerUnit;
      if (!(d < kTableUnits * kStepsPerUnit)) continue;  // also NaN
      if (bits[at - id] >= table[static_cast<size_t>(std::max(d, 0.0F))] || d < 0) consider(at - first_id, bits[at - id]);
    }
  }
  *index = best.index < 0 ? top : best.index;
  *score = best.score;
}

void gumbel_noise(uint64_t seed, uint32_t position, const int64_t* ids, int64_t n, double* noise) {
  uint32_t bits[4];
  for (int64_t i = 0; i < n; ++i) {
    sampling::philox<1>(seed, static_cast<uint64_t>(ids[i]) / 4, position, 0, bits);
    noise[i] = sampling::noise_of(bits[ids[i] % 4]);
  }
}

}  // namespace
}  // namespace serried
