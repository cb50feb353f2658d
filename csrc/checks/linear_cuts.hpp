// What the checks of all linears share: a result that differs says where, and every cut gives the bits of the whole.
// A Case has `linear`, `table`, `tokens`, `tiles`, `y_stride`, `floats()`, `run(linear, y, t0, t1, o0, o1)`, `name()`.
#pragma once
#include "linear_support.hpp"

namespace serried {
namespace {

constexpr float kUntouched = -12345.0f;

template <class Case>
[[noreturn]] void fail(const char* what, const Case& c, int token, int node, int output, double got, double want) {
  std::printf("FAILED %s: %s inputs %d outputs %d tokens %d leaves %zu nodes %d bias %d", what, c.name(), c.inputs,
              c.outputs, c.tokens, c.table.leaves.size(), c.table.nodes, c.with_bias);
  std::printf("; at token %d node %d output %d: %.9g, not %.9g\n", token, node, output, got, want);
  std::exit(1);
}

template <class Case>
void same(const char* what, const Case& c, const float* got, const float* want) {
  for (int64_t i = 0; i < c.floats(); ++i) {
    if (std::memcmp(got + i, want + i, 4) == 0) continue;
    const int64_t row = i / c.y_stride;
    fail(what, c, static_cast<int>(row / c.linear.nodes), static_cast<int>(row % c.linear.nodes),
         static_cast<int>(i % c.y_stride), got[i], want[i]);
  }
}

// The whole at once; what lies beyond the tiles stays as it was.
template <class Case>
std::vector<float> whole(Case& c) {
  std::vector<float> y(c.floats(), kUntouched);
  c.run(c.linear, y.data(), 0, c.tokens, 0, c.tiles);
  for (int64_t i = 0; i < c.floats(); ++i) {
    const bool beyond = i % c.y_stride >= c.tiles * 64;
    if (beyond && y[i] != kUntouched) fail("written beyond the tiles", c, 0, 0, static_cast<int>(i), y[i], kUntouched);
  }
  return y;
}

// Tokens alone, and ranges of tokens and tiles.
template <class Case>
void check_cuts(Case& c, const float* y) {
  std::vector<float> other(c.floats(), kUntouched);
  for (int t = 0; t < c.tokens; ++t) c.run(c.linear, other.data(), t, t + 1, 0, c.tiles);
  same("tokens alone", c, other.data(), y);
  for (int round = 0; round < 3; ++round) {
    std::fill(other.begin(), other.end(), kUntouched);
    for (int t = 0; t < c.tokens;) {
      const int tokens = std::min(pick(1, 70), c.tokens - t);
      for (int o = 0; o < c.tiles;) {
        const int tiles = std::min(pick(1, 3), c.tiles - o);
        c.run(c.linear, other.data(), t, t + tokens, o, o + tiles);
        o += tiles;
      }
      t += tokens;
    }
    same("ranges", c, other.data(), y);
  }
}

}  // namespace
}  // namespace serried
