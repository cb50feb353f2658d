// What the checks of linears share: timing, memory, random numbers, tables of leaves.
#pragma once
#include <sys/mman.h>
#include <time.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "../kernels/linear.hpp"

namespace serried {
namespace {

// The thread's own time: other processes may have the core in between.
double now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Memory in 2 MB pages, as the engine's arena is.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_((bytes + 2 * kPage) / kPage * kPage) {
    void* base = mmap(nullptr, bytes_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) std::abort();
    base_ = static_cast<char*>(base);
    data_ = base_ + (kPage - reinterpret_cast<uintptr_t>(base_) % kPage);
    madvise(data_, bytes_, MADV_HUGEPAGE);
    std::memset(data_, 0, bytes_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { munmap(base_, bytes_ + kPage); }
  template <class T = char>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }

 private:
  static constexpr size_t kPage = 2 << 20;
  size_t bytes_;
  char *base_, *data_;
};

std::mt19937_64 random_bits(1);
int pick(int low, int high) { return low + static_cast<int>(random_bits() % static_cast<uint64_t>(high - low + 1)); }
float normal() {
  static std::normal_distribution<float> distribution;
  return distribution(random_bits);
}

// The halving of [begin, end) in units, left part rounded up, to a depth of 6; nodes are the subtrees at depth `cut`.
struct Table {
  std::vector<Leaf> leaves;
  int nodes = 0;

  void node(int begin, int end, int unit, int depth, int cut) {
    if (depth < cut && end - begin > 1) {
      const int middle = begin + (end - begin + 1) / 2;
      node(begin, middle, unit, depth + 1, cut);
      node(middle, end, unit, depth + 1, cut);
      return;
    }
    tree(begin, end, unit, depth);
    leaves.back().ends_node = 1;
    ++nodes;
  }
  void tree(int begin, int end, int unit, int depth) {
    if (depth == 6 || end - begin == 1) {
      leaves.push_back({begin * unit, end * unit, 0, 0});
      return;
    }
    const int middle = begin + (end - begin + 1) / 2;
    tree(begin, middle, unit, depth + 1);
    tree(middle, end, unit, depth + 1);
    ++leaves.back().pops;
  }
};

Table one_leaf(int inputs) { return {{{0, inputs, 0, 1}}, 1}; }
Table tree_of(int units, int unit, int cut = 0) {
  Table table;
  table.node(0, units, unit, 0, cut);
  return table;
}

// ---- Timing ----

template <class F>
double seconds(F&& call) {
  const double start = now();
  call();
  return now() - start;
}

template <class F>
double best(int rounds, F&& call) {
  double least = 1e9;
  for (int i = 0; i < rounds; ++i) least = std::min(least, seconds(call));
  return least;
}

volatile uint64_t sink;

}  // namespace
}  // namespace serried
