// A group of ranks on one machine, seen from one of them.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/elements.hpp"
#include "comm/segment.hpp"
#include "comm/step_ring.hpp"
#include "comm/wait.hpp"

namespace serried {

struct RegionHead;

enum class Op : uint8_t {
  kNone, kAllReduce, kReduceNodes, kReduceScatter, kAllGather, kGather, kBroadcast, kSend, kRecv, kBarrier, kAgree,
  kSubgroup, kCount
};
const char* op_name(Op op);

enum class Algorithm : int32_t { kOneShot = 0, kTwoShot = 1, kRing = 2 };

// Of one operation. total_ns runs from entry (for a step of the program: from post) to end, wait_ns is the part of it
// spent until the last peer had arrived; what is left is the work of the collective itself.
struct OpStats {
  uint64_t calls = 0, bytes = 0;
  int64_t wait_ns = 0, total_ns = 0;
};

// Steps. Everything that involves the whole group is a sequence of steps s = 1, 2, 3, ...: a rank writes its slot of
// parity s % 2, posts s, waits until all have posted s, and reads the others' slots of that parity.
//   Two slots are enough: a rank that posts s + 1 has finished reading step s. So a rank that has seen everybody post
// s + 1 may overwrite its slot of step s, and the next step to use that slot is s + 2. One synchronisation a step.
//   A one-shot operation is one step; a two-shot operation is two, the second of which carries the folded shares.
//
// Every wait ends: in order, by an error of any rank, by the death of a peer (seen within 0.1 s), or by the deadline:
// `timeout` seconds in which no missing rank made progress. After an error the group is of no more use.
//
// For one thread at a time.
class ShmComm {
 public:
  // The world's group, in the memfd `fd` that all its ranks share. Does not wait for the others: absent() does.
  ShmComm(int fd, int rank, int size, size_t slot_bytes, double timeout);
  ~ShmComm();
  ShmComm(const ShmComm&) = delete;
  ShmComm& operator=(const ShmComm&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  size_t slot_bytes() const { return slot_bytes_; }

  // The ranks that have not joined after `seconds`; call it until none is left, then use the group.
  std::vector<int> absent(double seconds);

  // --- A step, for a program: no allocation, no copy. ---
  // Opens an operation: this rank's slot, of slot_bytes, to be written (by any thread). bytes: what it will bring, for
  // the counters; std::length_error where that is more than a slot. more: a further piece of the same operation.
  void* begin(Op op, size_t bytes, bool more = false);
  // Own slot for a further step of the same operation. The peers' slots of the step before stay readable until post.
  void* next();
  void post();
  void wait();
  // Time that was spent otherwise since the first post, and is no part of what the operation costs.
  void leave_out(int64_t ns) { started_ += ns; }
  // Only until `peer` has posted: for algorithms among neighbours. The last step of an operation must wait for all.
  void wait_for(int peer);
  // A rank's slot in the step that was begun last.
  const void* peer(int rank) const { return slot(rank, step_); }
  void end();
  // The rank got on with its work: restarts the deadlines of those who wait for it.
  void tick() { bump(segment_->mine().progress); }

  // --- Whole operations, in pieces where they are larger than a slot. The same bits on every rank. ---
  // x += the others', added in rank order (ring: in ring order); 16-bit floats are added in float32 and rounded once.
  void all_reduce(void* x, int64_t count, Element element, Algorithm algorithm);
  // nodes [tokens, counts[rank], columns] -> out [tokens, columns]; the nodes of all ranks in rank order are numbered
  // through and folded as `fold` says. Two-shot: each rank folds a share of the tokens.
  void reduce_nodes(const float* nodes, const int32_t* counts, const Fold& fold, int64_t tokens, int64_t columns,
                    float* out, Algorithm algorithm);
  // x: the parts of all ranks one after the other, counts[r] elements each; out: the sum of this rank's part.
  void reduce_scatter(const void* x, const int64_t* counts, Element element, void* out);
  // x [rows, parts[rank] bytes] -> out [rows, all parts], on every rank or (gather) on root alone.
  void all_gather(const void* x, int64_t rows, const int64_t* parts, void* out);
  void gather(const void* x, int64_t rows, const int64_t* parts, int root, void* out);
  void broadcast(void* x, size_t bytes, int root);
  void send(const void* x, size_t bytes, int to);
  void recv(void* x, size_t bytes, int source);
  void barrier();
  // The least of what all ranks say: for the instruction set that all of them have.
  int agree_min(int value);

  // A group of some ranks, in the order given; null on the others. All ranks of this group call it.
  std::unique_ptr<ShmComm> subgroup(const std::vector<int>& ranks);
  // A ring from rank 0 to the others, beside the collectives. All ranks of the world's own group call it.
  std::unique_ptr<StepRing> step_ring();
  // Leaves the group: who still waits for this rank is told so. No other call may follow.
  void close();
  // Tells all ranks of the world that this one failed.
  void fail(const std::string& reason);

  void set_timeout(double seconds);
  double timeout() const { return timeout_ == kForever ? 1e300 : static_cast<double>(timeout_) / kSecond; }
  // Called about every 50 ms of a long wait; may throw (a signal came).
  void set_interrupt(void (*check)()) { interrupt_ = check; }
  const OpStats& stats(Op op) const { return stats_[static_cast<int>(op)]; }
  void reset_stats() { stats_ = {}; }

 private:
  struct Line;
  struct Mailbox;
  struct Layout {
    size_t slot_stride, mailboxes, slots, chunks, bytes;
    Layout(int size, size_t slot_bytes);
  };
  // What a wait is for: a signal's value, given by one peer; or whoever has not posted this step.
  struct Wanted {
    const Signal& signal;
    uint32_t target;
    int peer;
    bool whole_group;
  };
  class Call;

  ShmComm(std::shared_ptr<Segment> segment, std::vector<int> names, int rank, uint64_t offset, int64_t timeout);

  RegionHead& region_head() const;
  Line& line(int rank) const;
  Mailbox& mailbox(int from, int to) const;
  char* chunk(int from, int to, uint32_t index) const;
  char* slot(int rank, uint32_t step) const;

  void open(Op op, size_t bytes);
  static void bump(std::atomic<uint64_t>& counter) {
    counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  uint32_t tag() const;
  static bool arrived(uint32_t value, uint32_t target);  // steps wrap around
  bool all_posted() const;
  void wait_until(const Signal& signal, uint32_t target, int peer);
  void check_tag(int peer);
  void await(Waiter& waiter, Deadline& deadline, const Wanted& wanted);
  int64_t look(Deadline& deadline, int64_t start, const Wanted& wanted);
  std::vector<int> missing(const Wanted& wanted) const;
  uint64_t progress_of(const std::vector<int>& ranks) const;
  void raise_for_gone(const Wanted& wanted);
  void give_up(const Wanted& wanted);
  std::string what() const;
  std::string names(const std::vector<int>& ranks) const;

  void all_reduce_shots(char* x, int64_t count, Element element, bool two);
  void all_reduce_ring(char* x, int64_t count, Element element);
  void nodes_piece(const float* nodes, const int32_t* counts, const Fold& fold, int64_t tokens, int64_t columns,
                   int64_t stride, float* out, bool two);
  void gather_pieces(const void* x, int64_t rows, const int64_t* parts, void* out);

  std::shared_ptr<Segment> segment_;
  const std::vector<int> names_;  // the members' ranks in the world
  const int rank_, size_;
  const size_t slot_bytes_;
  const Layout layout_;
  const uint64_t offset_;
  std::unique_ptr<Mapping> region_;
  int64_t timeout_;
  void (*interrupt_)() = nullptr;
  std::unique_ptr<CommError> broken_;

  uint32_t step_ = 0;
  std::array<uint64_t, static_cast<int>(Op::kCount)> sequence_{};  // by operation: sends are not everybody's
  Op op_ = Op::kNone;
  int64_t started_ = 0;
  std::array<OpStats, static_cast<int>(Op::kCount)> stats_{};
  std::vector<const float*> rows_;
  std::vector<float> scratch_;
  std::vector<const void*> sources_;
};

}  // namespace serried
