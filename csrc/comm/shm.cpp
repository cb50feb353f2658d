#include "comm/shm.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "comm/region.hpp"

namespace serried {

namespace {

constexpr int64_t kSuspicion = 20 * kMillisecond;  // a wait as long as this looks whether its peers live
constexpr int64_t kRollCall = kSecond;             // that ranks get to show that they are stuck, but alive
constexpr int64_t kHearsay = kRollCall + 300 * kMillisecond;  // that others get to name a culprit
constexpr const char* kNames[] = {"nothing", "all_reduce", "reduce_nodes", "reduce_scatter",
                                  "all_gather", "gather", "broadcast", "send",
                                  "recv", "barrier", "agree_min", "subgroup"};
static_assert(std::size(kNames) == static_cast<size_t>(Op::kCount));

std::vector<int> iota(int size) {
  std::vector<int> all(size);
  for (int i = 0; i < size; ++i) all[i] = i;
  return all;
}

std::string seconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", static_cast<double>(ns) / kSecond);
  return text;
}

std::string place(uint64_t where) {
  return std::string(op_name(static_cast<Op>(where >> 56))) + " #" + std::to_string(where & (kStuck - 1));
}

}  // namespace

const char* op_name(Op op) { return op < Op::kCount ? kNames[static_cast<int>(op)] : "?"; }

ShmComm::ShmComm(int fd, int rank, int size, size_t slot_bytes, double timeout)
    : ShmComm(std::make_shared<Segment>(fd, rank, size, slot_bytes), iota(size), rank, Segment::kRegionAlign, 0) {
  set_timeout(timeout);
}

ShmComm::ShmComm(std::shared_ptr<Segment> segment, std::vector<int> names, int rank, uint64_t offset, int64_t timeout)
    : segment_(std::move(segment)),
      names_(std::move(names)),
      rank_(rank),
      size_(static_cast<int>(names_.size())),
      slot_bytes_(segment_->slot_bytes()),
      layout_(size_, slot_bytes_),
      offset_(offset),
      timeout_(timeout),
      sources_(size_) {
  segment_->grow(offset + layout_.bytes);
  region_ = std::make_unique<Mapping>(segment_->fd(), offset, layout_.bytes, names_[rank]);
  // Own slots come into being here, on this rank's NUMA node, and not in the first step.
  madvise(region_->at(layout_.slots), layout_.chunks - layout_.slots, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
  const size_t page = 4096, first = layout_.slots + 2 * static_cast<size_t>(rank_) * layout_.slot_stride;
  madvise(region_->at(first / page * page), 2 * layout_.slot_stride / page * page, MADV_POPULATE_WRITE);
#endif
}

ShmComm::~ShmComm() { close(); }

void ShmComm::set_timeout(double seconds) {
  timeout_ = seconds > 1e9 ? kForever : std::llround(seconds * static_cast<double>(kSecond));
}

std::vector<int> ShmComm::absent(double seconds) {
  const int64_t until = now_ns() + static_cast<int64_t>(seconds * static_cast<double>(kSecond));
  for (;;) {
    segment_->raise_if_aborted();
    std::vector<int> ranks;
    std::copy_if(names_.begin(), names_.end(), std::back_inserter(ranks), [&](int r) { return !segment_->joined(r); });
    if (ranks.empty()) segment_->hold_peers();
    if (ranks.empty() || now_ns() >= until) return ranks;
    usleep(1000);
  }
}

// --- Steps ---

void ShmComm::open(Op op, size_t bytes) {
  if (broken_) [[unlikely]] throw CommError(*broken_);
  segment_->raise_if_aborted();
  op_ = op;
  const uint64_t sequence = ++sequence_[static_cast<int>(op)];
  segment_->mine().where.store(static_cast<uint64_t>(op) << 56 | sequence, std::memory_order_relaxed);
  OpStats& stats = stats_[static_cast<int>(op)];
  ++stats.calls;
  stats.bytes += bytes;
}

void* ShmComm::begin(Op op, size_t bytes, bool more) {
  if (bytes > slot_bytes_) throw std::length_error("a step brings more than a slot holds");
  open(op, bytes);
  if (more) --stats_[static_cast<int>(op)].calls;
  started_ = 0;
  return next();
}

void* ShmComm::next() {
  ++step_;
  return slot(rank_, step_);
}

// The tag tells whether all ranks are in the same call. It has two parities for the reason that slots have.
void ShmComm::post() {
  if (started_ == 0) started_ = now_ns();
  Line& mine = line(rank_);
  mine.tag[step_ & 1].store(tag(), std::memory_order_relaxed);
  tick();
  mine.posted.publish(step_);
}

uint32_t ShmComm::tag() const {
  return static_cast<uint32_t>(op_) << 24 | (sequence_[static_cast<int>(op_)] & 0xffffff);
}

bool ShmComm::arrived(uint32_t value, uint32_t target) { return static_cast<int32_t>(value - target) >= 0; }

bool ShmComm::all_posted() const {
  for (int r = 0; r < size_; ++r) {
    if (!arrived(line(r).posted.load(), step_)) return false;
  }
  return true;
}

void ShmComm::wait() {
  if (!all_posted()) {
    const int64_t start = now_ns();
    Waiter waiter;
    Deadline deadline(timeout_);
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) await(waiter, deadline, {line(r).posted, step_, r, true});
    }
    stats_[static_cast<int>(op_)].wait_ns += now_ns() - start;
  }
  for (int r = 0; r < size_; ++r) check_tag(r);
}

void ShmComm::wait_for(int peer) {
  wait_until(line(peer).posted, step_, peer);
  check_tag(peer);
}

void ShmComm::wait_until(const Signal& signal, uint32_t target, int peer) {
  if (arrived(signal.load(), target)) return;
  const int64_t start = now_ns();
  Waiter waiter;
  Deadline deadline(timeout_);
  await(waiter, deadline, {signal, target, peer, false});
  stats_[static_cast<int>(op_)].wait_ns += now_ns() - start;
}

void ShmComm::end() { stats_[static_cast<int>(op_)].total_ns += now_ns() - started_; }

void ShmComm::check_tag(int peer) {
  const uint32_t theirs = line(peer).tag[step_ & 1].load(std::memory_order_relaxed);
  if (theirs == tag()) [[likely]] return;
  const std::string there = op_name(static_cast<Op>(theirs >> 24));
  segment_->abort(names_[peer], what() + ": " + names({peer}) + " made another call, " + there + " #" +
                                    std::to_string(theirs & 0xffffff));
}

// --- Waiting, where it takes long ---

void ShmComm::await(Waiter& waiter, Deadline& deadline, const Wanted& wanted) {
  int64_t start = 0;
  const auto ready = [&](uint32_t value) { return arrived(value, wanted.target); };
  try {
    waiter.until(wanted.signal, ready, [&] {
      if (start == 0) start = now_ns();
      return look(deadline, start, wanted);
    });
  } catch (const CommError& error) {
    broken_ = std::make_unique<CommError>(error);
    throw;
  } catch (...) {
    broken_ = std::make_unique<CommError>(names_[rank_], what() + ": interrupted");
    throw;
  }
}

int64_t ShmComm::look(Deadline& deadline, int64_t start, const Wanted& wanted) {
  segment_->raise_if_aborted();
  bump(segment_->mine().beat);
  const int64_t now = now_ns();
  if (now - start >= kSuspicion) raise_for_gone(wanted);
  if (deadline.passed(now, progress_of(missing(wanted)))) give_up(wanted);
  if (interrupt_ && now - start >= kSleep) interrupt_();
  return std::min(now - start < kSuspicion ? kSuspicion : kSleep, deadline.left(now));
}

std::vector<int> ShmComm::missing(const Wanted& wanted) const {
  std::vector<int> ranks;
  if (!wanted.whole_group) {
    if (!arrived(wanted.signal.load(), wanted.target)) ranks.push_back(wanted.peer);
    return ranks;
  }
  for (int r = 0; r < size_; ++r) {
    if (!arrived(line(r).posted.load(), step_)) ranks.push_back(r);
  }
  return ranks;
}

uint64_t ShmComm::progress_of(const std::vector<int>& ranks) const {
  uint64_t total = 0;
  for (int r : ranks) total += segment_->line(names_[r]).progress.load(std::memory_order_relaxed);
  return total;
}

// A peer may do its part and then leave or end: so whether it is gone is asked first, and then whether it is missing.
void ShmComm::raise_for_gone(const Wanted& wanted) {
  for (int r : missing(wanted)) {
    const bool left = line(r).left.load(std::memory_order_acquire) != 0;
    if (!left && !segment_->died(names_[r])) continue;
    const std::vector<int> late = missing(wanted);
    if (std::find(late.begin(), late.end(), r) == late.end()) continue;
    const std::string pid = std::to_string(segment_->line(names_[r]).pid.load());
    segment_->abort(names_[r], what() + ": " + names({r}) + (left ? " has left" : " has died (process " + pid + ")"));
  }
}

// The deadline has passed. Who of the missing still shows a sign of life is stuck in a wait of his own and no culprit:
// then whoever waits for the culprit is given the time to name him.
void ShmComm::give_up(const Wanted& wanted) {
  const int64_t start = now_ns();
  const auto beat = [&](int r) { return segment_->line(names_[r]).beat.load(std::memory_order_relaxed); };
  const auto stuck = [&](int r) { return (segment_->line(names_[r]).where.load() & kStuck) != 0; };
  std::vector<uint64_t> before(size_);
  for (int r = 0; r < size_; ++r) before[r] = beat(r);
  std::vector<int> silent, late;
  do {
    usleep(5000);
    segment_->raise_if_aborted();
    bump(segment_->mine().beat);
    late = missing(wanted);
    if (late.empty()) return;
    silent.clear();
    std::copy_if(late.begin(), late.end(), std::back_inserter(silent),
                 [&](int r) { return beat(r) == before[r] && !stuck(r); });
  } while (now_ns() - start < (silent.empty() ? kHearsay : kRollCall));
  if (!silent.empty()) {
    const std::string text = what() + ": no sign of " + names(silent) + " within " + seconds(timeout_);
    segment_->abort(names_[silent[0]], text);
  }
  segment_->mine().where.fetch_or(kStuck);
  std::string text = what() + ": not done after " + seconds(timeout_) + ", with";
  for (int r : late) {
    text += (r == late[0] ? " " : ", ") + names({r}) + " in " + place(segment_->line(names_[r]).where.load());
  }
  throw CommError(names_[rank_], text);
}

std::string ShmComm::what() const {
  const std::string number = std::to_string(sequence_[static_cast<int>(op_)]);
  return std::string(op_name(op_)) + " #" + number + " of " + names(iota(size_));
}

std::string ShmComm::names(const std::vector<int>& ranks) const {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (const int& r : ranks) text += (&r == &ranks[0] ? "" : ", ") + std::to_string(names_[r]);
  return text;
}

void ShmComm::fail(const std::string& reason) {
  try {
    segment_->abort(names_[rank_], reason);
  } catch (const CommError& first) {
    broken_ = std::make_unique<CommError>(first);
  }
}

// --- Subgroups ---

std::unique_ptr<ShmComm> ShmComm::subgroup(const std::vector<int>& ranks) {
  Call call(*this, Op::kSubgroup, 0);
  const Layout layout(static_cast<int>(ranks.size()), slot_bytes_);
  uint64_t* own = static_cast<uint64_t*>(next());
  if (rank_ == 0) {
    *own = segment_->allocate(Segment::kRegionAlign + Layout(segment_->size(), slot_bytes_).bytes, layout.bytes);
  }
  post();
  wait();
  const uint64_t offset = *static_cast<const uint64_t*>(peer(0));
  const auto found = std::find(ranks.begin(), ranks.end(), rank_);
  if (found == ranks.end()) return nullptr;
  std::vector<int> members;
  for (int r : ranks) members.push_back(names_[r]);
  const int rank = static_cast<int>(found - ranks.begin());
  std::unique_ptr<ShmComm> group(new ShmComm(segment_, std::move(members), rank, offset, timeout_));
  group->set_interrupt(interrupt_);
  return group;
}

std::unique_ptr<StepRing> ShmComm::step_ring() {
  Call call(*this, Op::kSubgroup, 0);
  uint64_t* own = static_cast<uint64_t*>(next());
  if (rank_ == 0) *own = StepRing::allocate(*segment_, Segment::kRegionAlign + layout_.bytes);
  post();
  wait();
  return std::make_unique<StepRing>(segment_, *static_cast<const uint64_t*>(peer(0)), interrupt_);
}

void ShmComm::close() {
  if (!region_) return;
  if (!broken_) line(rank_).left.store(1, std::memory_order_release);  // else the others learn more from the error
  line(rank_).posted.wake();
  const bool last = region_head().left.fetch_add(1) + 1 == static_cast<uint32_t>(size_);
  if (last) segment_->release(offset_, layout_.bytes);
  region_.reset();
  segment_.reset();
}

}  // namespace serried
