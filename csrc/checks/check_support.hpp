// What the checks share: counted expectations, typed buffers, timing.
#pragma once
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "../kernels/kernels.hpp"
#include "../kernels/simd.hpp"

namespace serried {
namespace {

long long checks = 0, failures = 0;

// Counts; prints the first few failures of each kind.
void expect(bool holds, const char* what) {
  static std::map<std::string, int> seen;
  ++checks;
  if (holds) return;
  ++failures;
  if (++seen[what] == 1) std::printf("FAILED: %s\n", what);
}

float widen(uint16_t bits) {
  const uint32_t u = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
// To nearest even, by hand: the check's own.
uint16_t narrow(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if (std::isnan(x)) return uint16_t((u >> 16) | 0x40);
  const uint32_t rest = u & 0xffff;
  return uint16_t((u >> 16) + (rest > 0x8000 || (rest == 0x8000 && ((u >> 16) & 1))));
}

// An array of float32 or bf16.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Dtype dtype, size_t n, float fill) : dtype_(dtype), n_(n), bytes_(n * (dtype == Dtype::kFloat32 ? 4 : 2)) {
    for (size_t i = 0; i < n; ++i) set(i, fill);
  }
  void set(size_t i, float x) {
    if (dtype_ == Dtype::kFloat32) return void(std::memcpy(&bytes_[4 * i], &x, 4));
    const uint16_t b = narrow(x);
    std::memcpy(&bytes_[2 * i], &b, 2);
  }
  float operator[](size_t i) const {
    float x;
    uint16_t b;
    if (dtype_ == Dtype::kFloat32) return std::memcpy(&x, &bytes_[4 * i], 4), x;
    return std::memcpy(&b, &bytes_[2 * i], 2), widen(b);
  }
  void* data() { return bytes_.data(); }
  size_t size() const { return n_; }
  bool operator==(const Buffer& other) const { return bytes_ == other.bytes_; }
  bool equals(const Buffer& other, size_t begin, size_t end) const {
    const size_t width = dtype_ == Dtype::kFloat32 ? 4 : 2;
    return std::memcmp(&bytes_[begin * width], &other.bytes_[begin * width], (end - begin) * width) == 0;
  }

 private:
  Dtype dtype_ = Dtype::kFloat32;
  size_t n_ = 0;
  std::vector<char> bytes_;
};

// Memory in 2 MB pages where the system grants them.
class Huge {
 public:
  explicit Huge(size_t bytes) : bytes_((bytes + (4 << 20)) & ~size_t{(2 << 20) - 1}) {
    data_ = static_cast<char*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    madvise(data_, bytes_, MADV_HUGEPAGE);
    std::memset(data_, 1, bytes_);
  }
  Huge(const Huge&) = delete;
  ~Huge() { munmap(data_, bytes_); }
  char* data() { return data_; }

 private:
  size_t bytes_;
  char* data_;
};

std::vector<float> normals(std::mt19937& random, size_t n, float spread = 1) {
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> x(n);
  for (float& value : x) value = normal(random);
  return x;
}

// Seconds of this thread on a core: other processes may hold the machine at times.
double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// The best time of several runs, in seconds.
template <class F>
double best(F f, int runs) {
  double least = 1e9;
  for (int i = 0; i < runs; ++i) {
    const double start = thread_seconds();
    f();
    least = std::min(least, thread_seconds() - start);
  }
  return least;
}

// What begin_thread does in the program: denormals are zero, and leave to use AMX.
void begin() {
#if defined(__SSE__)
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#endif
#if SERRIED_amx
  syscall(SYS_arch_prctl, 0x1023, 18);
#endif
}

volatile float sink;

// GFLOP/s of multiply-adds in registers.
double fma_rate() {
  using namespace simd;
  constexpr int kChains = kLanes == 16 ? 20 : 10, kRounds = 1000000;
  V acc[kChains] = {};
  V a = set(1.0f), b = set(1e-9f);
  asm volatile("" : "+m"(a), "+m"(b));
  const double time = best(
      [&] {
        for (int i = 0; i < kRounds; ++i) {
#pragma GCC unroll 20
          for (int j = 0; j < kChains; ++j) acc[j] = simd::fma(acc[j], a, b);
        }
      },
      10);
  for (int j = 0; j < kChains; ++j) sink = acc[j][0];
  return 2e-9 * kLanes * kChains * kRounds / time;
}

// GB/s of reading memory in one straight line.
double read_rate() {
  constexpr size_t kBytes = size_t{512} << 20;
  Huge memory(kBytes);
  uint64_t total = 0;
  const double time = best(
      [&] {
        simd::U sum[4] = {};
        for (size_t i = 0; i < kBytes; i += 16 * simd::kLanes)
          for (int j = 0; j < 4; ++j) {
            __builtin_prefetch(memory.data() + i + 4096 + 4 * j * simd::kLanes);
            sum[j] += simd::load_bits(memory.data() + i + 4 * j * simd::kLanes);
          }
        total += (sum[0] + sum[1] + sum[2] + sum[3])[0];
      },
      5);
  sink = float(total);
  return 1e-9 * kBytes / time;
}

}  // namespace
}  // namespace serried
