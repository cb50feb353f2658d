// The memory that the ranks of a world share, and what each of them can know of the others from it.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace serried {

// What went wrong between ranks: names the rank (of the world) that is to blame.
class CommError : public std::runtime_error {
 public:
  CommError(int rank, const std::string& reason) : std::runtime_error(reason), rank(rank) {}
  int rank;
};

// A mapped range of a file; rank: whom an error names.
class Mapping {
 public:
  Mapping(int fd, uint64_t offset, size_t bytes, int rank);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* at(size_t offset) const { return data_ + offset; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_;
  size_t bytes_;
};

constexpr uint64_t kStuck = uint64_t{1} << 55;

// What a rank tells of itself. Two cache lines, because cores fetch lines in pairs; written by that rank alone.
struct alignas(128) RankLine {
  std::atomic<int32_t> pid;        // 0: has not joined
  std::atomic<uint64_t> progress;  // moves while the rank gets on with its work: restarts the deadlines of others
  std::atomic<uint64_t> beat;      // moves while the rank waits: it is alive, but stuck as well
  std::atomic<uint64_t> where;     // operation << 56 | sequence number, and kStuck where it has given up there
};

// The first error of all ranks, which every rank then raises.
struct AbortRecord {
  std::atomic<uint32_t> state;  // 0: none, 1: being written, 2: there
  int32_t rank;
  char text[4088];
};

// A memfd:
//   0         Header, RankLine[size]
//   2 MiB     the region of the world's own group (its layout: shm.hpp)
//   then      regions of subgroups, each allocated when it is made
// A memfd has no name, leaves nothing behind, does not care how small /dev/shm is, and is sparse: pages that nobody
// touches cost nothing. Subgroups get their room by growing the one file that every rank holds anyway: no second
// descriptor has to travel (/proc/<pid>/fd needs ptrace rights), and there is no table that could be full.
//
// A fresh file is all zeros, and zeros are the valid first state of everything in it. So no rank has to come first.
class Segment {
 public:
  static constexpr int kMaxRanks = 256;
  static constexpr size_t kRegionAlign = size_t{2} << 20;  // of a huge page

  // Takes a duplicate of fd. Throws CommError where the file was made for another world, or the rank is taken.
  Segment(int fd, int rank, int size, size_t slot_bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  size_t slot_bytes() const { return slot_bytes_; }
  int fd() const { return fd_; }
  RankLine& line(int rank) { return lines_[rank]; }
  RankLine& mine() { return lines_[rank_]; }

  // Room for a subgroup's region, at an offset that no other has; for one rank to call, and to tell the others.
  uint64_t allocate(uint64_t first, size_t bytes);
  // Makes the file reach to `end`; never shorter.
  void grow(uint64_t end);
  // Gives the pages of a region back.
  void release(uint64_t offset, size_t bytes);

  bool joined(int rank) const { return lines_[rank].pid.load(std::memory_order_acquire) != 0; }
  // Takes hold of the peers that have joined, so that a reused process id cannot be mistaken for them.
  void hold_peers();
  // Whether the process of a rank that has joined is gone. A system call: not for the fast path.
  bool died(int rank) const;

  bool aborted() const { return abort_->state.load(std::memory_order_acquire) != 0; }
  void raise_if_aborted() {
    if (aborted()) [[unlikely]] raise_abort();
  }
  // Makes this the error of all ranks, if it is the first, and throws the first.
  [[noreturn]] void abort(int rank, const std::string& reason);

 private:
  struct Header;
  [[noreturn]] void raise_abort();
  void agree();

  const int rank_, size_;
  const size_t slot_bytes_;
  int fd_;
  std::unique_ptr<Mapping> mapping_;
  Header* header_ = nullptr;
  AbortRecord* abort_ = nullptr;
  RankLine* lines_ = nullptr;
  std::vector<int> pidfds_;
};

}  // namespace serried
