// What a group's region of the segment holds; private to the ShmComm sources.
#pragma once
#include "comm/shm.hpp"

namespace serried {

// A group's region:
//   RegionHead
//   Line[size]                      a rank's arrivals: written by it, watched by the others
//   Mailbox[size][size]             [from][to]
//   slots                           [rank][parity], each slot_bytes at a stride of a page more
//   chunks                          [from][to][kChunks], each kChunkBytes
// Only what is used takes memory: a pair of ranks that never sends has a mailbox that was never touched.
struct alignas(128) RegionHead {
  std::atomic<uint32_t> left;  // how many have closed the group: the last one gives the pages back
};

struct alignas(128) ShmComm::Line {
  Signal posted;  // the last step that this rank has posted
  std::atomic<uint32_t> tag[2];
  std::atomic<uint32_t> left;
};

// A ring of chunks from one rank to another: no other rank is involved, and a message of up to kChunks chunks is sent
// before anybody receives it.
struct alignas(128) ShmComm::Mailbox {
  alignas(64) Signal written;
  alignas(64) Signal read;
};

constexpr uint32_t kChunks = 4;
constexpr size_t kChunkBytes = 64 << 10;
constexpr size_t kChunkHead = 64;  // of it: the size of the message whose chunk this is
constexpr size_t kChunkBody = kChunkBytes - kChunkHead;

inline ShmComm::Layout::Layout(int size, size_t slot_bytes) {
  const size_t n = static_cast<size_t>(size), page = 4096;
  slot_stride = (slot_bytes + page - 1) / page * page + page;
  mailboxes = sizeof(RegionHead) + n * sizeof(Line);
  slots = (mailboxes + n * n * sizeof(Mailbox) + page - 1) / page * page;
  chunks = slots + 2 * n * slot_stride;
  const size_t used = chunks + n * n * kChunks * kChunkBytes + page;  // the last byte is not used: Segment::grow
  bytes = (used + Segment::kRegionAlign - 1) / Segment::kRegionAlign * Segment::kRegionAlign;
}

inline RegionHead& ShmComm::region_head() const { return *reinterpret_cast<RegionHead*>(region_->at(0)); }

inline ShmComm::Line& ShmComm::line(int rank) const {
  return reinterpret_cast<Line*>(region_->at(sizeof(RegionHead)))[rank];
}

inline ShmComm::Mailbox& ShmComm::mailbox(int from, int to) const {
  return reinterpret_cast<Mailbox*>(region_->at(layout_.mailboxes))[from * size_ + to];
}

inline char* ShmComm::chunk(int from, int to, uint32_t index) const {
  const size_t pair = static_cast<size_t>(from) * size_ + to;
  return region_->at(layout_.chunks + (pair * kChunks + index % kChunks) * kChunkBytes);
}

// The same place in two slots never has the same address modulo 4096: it would fall into the same sets of the level-1
// cache for all ranks, and a load would be taken to depend on an unrelated store.
inline char* ShmComm::slot(int rank, uint32_t step) const {
  const size_t index = 2 * static_cast<size_t>(rank) + (step & 1);
  return region_->at(layout_.slots + index * layout_.slot_stride + index * 5 % 64 * 64);
}

// Opens an operation, and ends it whatever happens.
class ShmComm::Call {
 public:
  Call(ShmComm& comm, Op op, size_t bytes) : comm_(comm) {
    comm.open(op, bytes);
    comm.started_ = now_ns();
  }
  ~Call() { comm_.end(); }

 private:
  ShmComm& comm_;
};

}  // namespace serried
