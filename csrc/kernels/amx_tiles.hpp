// The tile registers of AMX, as linears use them, and a thread's memory for what is copied into tiles.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace serried {
namespace {
namespace linear_detail {
namespace amx {

// Assembly rather than intrinsics: GCC 12's tile loads do not tell the compiler that they read memory.
template <int kReg>
inline void load(const void* data, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(data), "r"(stride), "i"(kReg) : "memory");
}
template <int kReg>
inline void store(void* data, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(data), "r"(stride), "i"(kReg) : "memory");
}
template <int kReg>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kReg));
}
// bf16, to float32.
template <int kSum, int kX, int kWeight>
inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kX), "i"(kWeight));
}
// Signed bytes, to int32.
template <int kSum, int kX, int kWeight>
inline void multiply_add_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kX), "i"(kWeight));
}
// Signed bytes of x times unsigned ones, to int32.
template <int kSum, int kX, int kWeight>
inline void multiply_add_mixed() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kX), "i"(kWeight));
}

// tmm0 to tmm3: sums of `rows` tokens and 16 outputs. tmm4, tmm5: `rows` tokens of x, `x_bytes` each. tmm6, tmm7: weights
// of 16 outputs, four bytes of k a row.
inline void configure(int rows, int x_bytes = 64) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int reg = 0; reg < 8; ++reg) {
    config.bytes[reg] = static_cast<uint16_t>(reg == 4 || reg == 5 ? x_bytes : 64);
    config.rows[reg] = static_cast<uint8_t>(reg < 6 ? rows : x_bytes / 4);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}
inline void release() { asm volatile("tilerelease" ::: "memory"); }

constexpr int kRows = 16;         // of a tile
constexpr int64_t kPage = 4096;
constexpr int64_t kStreamBytes = 1 << 20;  // of y, from which on caches are no use

// Memory of a thread, as much as it ever needed.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }
  // Null where there is none.
  char* get(size_t bytes) {
    if (bytes <= size_) return data_;
    std::free(data_);
    size_ = (bytes + kPage - 1) / kPage * kPage;
    data_ = static_cast<char*>(std::aligned_alloc(kPage, size_));
    if (!data_) size_ = 0;
    return data_;
  }
  // The same, or the process ends.
  char* take(size_t bytes) {
    if (!get(bytes)) std::abort();
    return data_;
  }
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace amx
}  // namespace linear_detail
}  // namespace
}  // namespace serried
