#include "comm/step_ring.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "comm/wait.hpp"

namespace serried {

namespace {

constexpr uint32_t kChunks = 16;
constexpr size_t kChunkBody = (size_t{64} << 10) - 64;

}  // namespace

struct StepRing::Head {
  alignas(128) Signal written;  // chunks, by rank 0
  struct alignas(128) Reader {
    Signal read;  // chunks, by this rank
  } readers[Segment::kMaxRanks];
};

struct alignas(64) StepRing::Chunk {
  uint64_t size;  // of the whole frame
  alignas(64) char body[kChunkBody];
};

namespace {

constexpr size_t kHeadBytes = size_t{128} * (Segment::kMaxRanks + 1);

}  // namespace

uint64_t StepRing::allocate(Segment& segment, uint64_t first) {
  return segment.allocate(first, kHeadBytes + kChunks * sizeof(Chunk) + 4096);
}

StepRing::StepRing(std::shared_ptr<Segment> segment, uint64_t offset, void (*interrupt)())
    : segment_(std::move(segment)), offset_(offset), interrupt_(interrupt) {
  static_assert(sizeof(Head) <= kHeadBytes);
  const size_t bytes = kHeadBytes + kChunks * sizeof(Chunk);
  segment_->grow(offset + bytes + 4096);
  region_ = std::make_unique<Mapping>(segment_->fd(), offset, bytes, segment_->rank());
}

StepRing::~StepRing() = default;

StepRing::Head& StepRing::head() const { return *reinterpret_cast<Head*>(region_->at(0)); }

StepRing::Chunk& StepRing::chunk(uint32_t index) const {
  return reinterpret_cast<Chunk*>(region_->at(kHeadBytes))[index % kChunks];
}

void StepRing::write(const void* data, size_t bytes, int64_t patience) {
  const char* from = static_cast<const char*>(data);
  size_t start = 0;
  do {
    make_room(next_, patience);
    Chunk& to = chunk(next_);
    const size_t n = std::min(kChunkBody, bytes - start);
    to.size = bytes;
    std::memcpy(to.body, from + start, n);
    start += n;
    head().written.publish(++next_);
  } while (start < bytes);
}

std::string StepRing::read() {
  std::string frame;
  do {
    await_chunk(next_);
    const Chunk& from = chunk(next_);
    const size_t size = from.size, n = std::min(kChunkBody, size - frame.size());
    frame.append(from.body, n);
    head().readers[segment_->rank()].read.publish(++next_);
    if (frame.size() == size) return frame;
  } while (true);
}

// The chunk that is to be overwritten has been read by everybody.
void StepRing::make_room(uint32_t index, int64_t patience) {
  for (int rank = 1; rank < segment_->size(); ++rank) {
    const Signal& read = head().readers[rank].read;
    Deadline deadline(patience);
    Waiter().until(
        read, [&](uint32_t value) { return index - value < kChunks; },
        [&] {
          segment_->raise_if_aborted();
          if (interrupt_) interrupt_();
          if (segment_->died(rank)) segment_->abort(rank, "died before it took its next step");
          const int64_t now = now_ns();
          if (deadline.passed(now, read.load()))
            segment_->abort(rank, "has taken no step for " + std::to_string(patience / kSecond) + " s");
          return std::min(kSleep, deadline.left(now));
        });
  }
}

void StepRing::await_chunk(uint32_t index) {
  Waiter().until(
      head().written, [&](uint32_t value) { return value != index; },
      [&] {
        segment_->raise_if_aborted();
        if (interrupt_) interrupt_();
        if (segment_->died(0)) throw CommError(0, "died");
        return kSleep;
      });
}

}  // namespace serried
