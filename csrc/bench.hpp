// What `serried bench` measures in C++: the limits of memory and multipliers, and a linear by itself.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "comm/wait.hpp"
#include "kernels/kernels.hpp"
#include "program/operators.hpp"
#include "program/pool.hpp"

namespace serried {

// Seconds that the pool's threads take to read `bytes` bytes, each its share.
inline double read_seconds(const Kernels& k, Pool& pool, const void* data, size_t bytes) {
  std::atomic<uint64_t> sink{0};
  const size_t unit = 4096, units = bytes / unit;
  const int64_t start = now_ns();
  pool.run([&](int thread, int threads) {
    const auto [a, b] = share(static_cast<int64_t>(units), thread, threads);
    sink += k.read(static_cast<const char*>(data) + static_cast<size_t>(a) * unit, static_cast<size_t>(b - a) * unit);
  });
  return static_cast<double>(now_ns() - start) * 1e-9;
}

// Floating-point operations a second of all threads together, in registers only.
inline double multiply_rate(const Kernels& k, Pool& pool, Dtype dtype, int64_t iterations) {
  std::atomic<double> flops{0};
  const int64_t start = now_ns();
  pool.run([&](int, int) { flops += k.multiply(dtype, iterations); });
  return flops / (static_cast<double>(now_ns() - start) * 1e-9);
}

// Seconds of one linear over `tokens` rows; leaves empty: one leaf over all inputs.
inline double linear_seconds(const Kernels& k, Pool& pool, const Linear& given, Format format, std::vector<Leaf> leaves,
                             const void* x, int64_t x_stride, float* y, int32_t tokens) {
  Linear linear = given;
  if (leaves.empty()) leaves = {Leaf{0, linear.inputs, 0, 1}};
  linear.leaves = leaves.data();
  linear.leaf_count = static_cast<int32_t>(leaves.size());
  linear.nodes = 0;
  for (const Leaf& leaf : leaves) linear.nodes += leaf.ends_node;
  const int64_t start = now_ns();
  run_linear(k, pool, linear, format, x, x_stride, y, int64_t{linear.tiles} * kTile, tokens);
  return static_cast<double>(now_ns() - start) * 1e-9;
}

}  // namespace serried
