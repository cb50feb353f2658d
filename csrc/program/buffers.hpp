// Memory of a program: weights that stay, and buffers that the operators of a step hand on to each other.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "kernels/kernels.hpp"

namespace serried {

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

inline size_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : dtype == Dtype::kBFloat16 ? 2 : 1; }

inline bool quantized(Format format) { return format != Format::kFloat32 && format != Format::kBFloat16; }

// What a weight multiplies with.
inline Dtype input_of(Format format) {
  if (quantized(format)) return Dtype::kInt8;
  return format == Format::kFloat32 ? Dtype::kFloat32 : Dtype::kBFloat16;
}

// Bytes of a block of GGML: a group of one row. A group of a tile has those of 64 of them.
inline int64_t block_bytes(Format format) { return input_bytes(format) * kGroup / kTile; }

// Anonymous memory in 2 MB pages where the kernel has them, handed out from the front; pages cost nothing until they
// are touched, so a chunk may be generous. Zeroed.
class Arena {
 public:
  static constexpr size_t kChunk = size_t{1} << 30;
  static constexpr size_t kHuge = size_t{2} << 20;
  static constexpr size_t kAlign = 256;

  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (const Chunk& chunk : chunks_) munmap(chunk.map, chunk.mapped);
  }

  void* allocate(size_t bytes) {
    bytes = static_cast<size_t>(round_up(static_cast<int64_t>(bytes ? bytes : 1), kAlign));
    if (bytes > left_) grow(bytes);
    void* result = next_;
    next_ += bytes;
    left_ -= bytes;
    return result;
  }

 private:
  struct Chunk {
    void* map;
    size_t mapped;
  };

  void grow(size_t bytes) {
    const size_t size = static_cast<size_t>(round_up(static_cast<int64_t>(bytes > kChunk ? bytes : kChunk), kHuge));
    const size_t mapped = size + kHuge;  // room to begin at a 2 MB boundary
    void* map = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) throw std::bad_alloc();
    chunks_.push_back({map, mapped});
    const uintptr_t start = static_cast<uintptr_t>(round_up(static_cast<int64_t>(reinterpret_cast<uintptr_t>(map)), kHuge));
    next_ = reinterpret_cast<char*>(start);
    left_ = size;
    madvise(next_, size, MADV_HUGEPAGE);
  }

  std::vector<Chunk> chunks_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

// What an operator reads or writes: rows (the step's tokens, or the rows that want logits) of so many columns.
struct Buffer {
  Dtype dtype;
  bool open;  // the dtype is not settled yet: the first consumer will say
  int twin;   // the buffer whose rows these are, so that both have one dtype; -1: none
  int64_t columns;
  int64_t stride;  // elements between rows
  int64_t rows;    // at most
  bool logit_rows;  // its rows are those that want logits, not all tokens
  bool padded;     // the columns from `columns` to `stride` are zeros, as a linear needs them
  int64_t widest = 0;  // of the reductions that add to it, the most nodes of a rank; 0: none does
  bool whole = false;  // another operator touches it after a reduction, and needs all its rows
  char* data = nullptr;
  int first_use = -1, last_use = -1;

  size_t bytes() const { return static_cast<size_t>(rows * row_bytes(dtype, stride)); }
  template <class T>
  T* row(int64_t r) const {
    return reinterpret_cast<T*>(data + static_cast<size_t>(r * row_bytes(dtype, stride)));
  }
};

// Gives buffers their memory: two share it where the last use of one comes before the first use of the other.
inline void place(std::vector<Buffer>& buffers, Arena& arena) {
  struct Region {
    char* data;
    size_t bytes;
    int free_after;
  };
  std::vector<Region> regions;
  std::vector<size_t> order(buffers.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;  // buffers are made in the order of their first use
  for (size_t i : order) {
    Buffer& buffer = buffers[i];
    Region* best = nullptr;
    for (Region& region : regions) {
      const bool fits = region.free_after < buffer.first_use && region.bytes >= buffer.bytes();
      if (fits && (!best || region.bytes < best->bytes)) best = &region;
    }
    if (!best) {
      regions.push_back({static_cast<char*>(arena.allocate(buffer.bytes())), buffer.bytes(), -1});
      best = &regions.back();
    }
    buffer.data = best->data;
    best->free_after = buffer.last_use;
  }
}

}  // namespace serried
