// A ring from rank 0 to all other ranks of a world: the way of a step. A frame goes in chunks; each reader moves on by
// itself, and the writer waits only where the slowest is a whole ring behind.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/segment.hpp"

namespace serried {

class StepRing {
 public:
  // Room for a ring in the segment; for one rank to call, and to tell the others.
  static uint64_t allocate(Segment& segment, uint64_t first);

  StepRing(std::shared_ptr<Segment> segment, uint64_t offset, void (*interrupt)());
  ~StepRing();
  StepRing(const StepRing&) = delete;
  StepRing& operator=(const StepRing&) = delete;

  // Rank 0: hands a frame to everybody. CommError names the rank that has died, or has read nothing for `patience` ns.
  void write(const void* data, size_t bytes, int64_t patience);
  // The others: the next frame, however long it takes. CommError where rank 0 is gone, or any rank has failed.
  std::string read();

 private:
  struct Head;
  struct Chunk;
  Head& head() const;
  Chunk& chunk(uint32_t index) const;
  void make_room(uint32_t index, int64_t patience);
  void await_chunk(uint32_t index);

  std::shared_ptr<Segment> segment_;
  const uint64_t offset_;
  std::unique_ptr<Mapping> region_;
  void (*const interrupt_)();
  uint32_t next_ = 0;  // chunk that is written or read next; counts wrap around
};

}  // namespace serried
