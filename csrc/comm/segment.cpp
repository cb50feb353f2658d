#include "comm/segment.hpp"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "comm/wait.hpp"

namespace serried {

namespace {

constexpr uint64_t kMagic = 0x5345'5252'4945'4431;  // SERRIED1
constexpr uint64_t kLayoutVersion = 1;              // of everything in the file

CommError failed(int rank, const char* what) {
  return CommError(rank, std::string("shared memory: ") + what + ": " + strerror(errno));
}

// Writes a word that all ranks must agree on: the first to come sets it. Returns what it is.
uint64_t settle(std::atomic<uint64_t>& word, uint64_t value) {
  uint64_t found = 0;
  return word.compare_exchange_strong(found, value) ? value : found;
}

int open_pidfd(int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  errno = ENOSYS;
  return -1;
#endif
}

constexpr int kUnheld = -1;  // not asked yet, or the kernel has no pidfds
constexpr int kDead = -2;    // was gone when we asked

}  // namespace

Mapping::Mapping(int fd, uint64_t offset, size_t bytes, int rank) : bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) throw failed(rank, "cannot map it");
  data_ = static_cast<char*>(data);
}

Mapping::~Mapping() { munmap(data_, bytes_); }

struct Segment::Header {
  std::atomic<uint64_t> magic;
  std::atomic<uint64_t> shape;  // version << 56 | size << 40 | slot bytes
  std::atomic<uint64_t> extra;  // bytes given to subgroups
  AbortRecord abort;
};

Segment::Segment(int fd, int rank, int size, size_t slot_bytes) : rank_(rank), size_(size), slot_bytes_(slot_bytes) {
  static_assert(sizeof(Header) + 128 + kMaxRanks * sizeof(RankLine) < kRegionAlign);
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size));
  }
  if (slot_bytes < 4096 || slot_bytes % 64 || slot_bytes >> 40) throw std::invalid_argument("slot_bytes");
  fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (fd_ < 0) throw failed(rank, "cannot take its descriptor");
  try {
    grow(kRegionAlign);
    mapping_ = std::make_unique<Mapping>(fd_, 0, kRegionAlign, rank);
    header_ = reinterpret_cast<Header*>(mapping_->at(0));
    abort_ = &header_->abort;
    lines_ = reinterpret_cast<RankLine*>(mapping_->at((sizeof(Header) + 127) / 128 * 128));
    pidfds_.assign(size, kUnheld);
    agree();
  } catch (...) {
    close(fd_);
    throw;
  }
}

Segment::~Segment() {
  for (int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
  close(fd_);
}

// Do all mean the same world? And is this the only process that is this rank?
void Segment::agree() {
  if (settle(header_->magic, kMagic) != kMagic) throw CommError(rank_, "shared memory: it holds something else");
  const uint64_t shape = kLayoutVersion << 56 | static_cast<uint64_t>(size_) << 40 | slot_bytes_;
  const uint64_t found = settle(header_->shape, shape);
  if (found != shape) {
    const auto text = [](uint64_t s) {
      return std::to_string(s >> 40 & 0xffff) + " ranks with slots of " + std::to_string(s & ((1ull << 40) - 1)) +
             " bytes (layout " + std::to_string(s >> 56) + ")";
    };
    throw CommError(rank_, "shared memory: another rank made it for " + text(found) + ", this one wants " +
                               text(shape));
  }
  int32_t holder = 0;
  if (!mine().pid.compare_exchange_strong(holder, getpid())) {
    throw CommError(rank_, "process " + std::to_string(holder) + " is rank " + std::to_string(rank_) + " already");
  }
}

// By a write to the last byte, which nobody uses: unlike ftruncate, it cannot cut off what a rank with other ideas of
// the size already uses.
void Segment::grow(uint64_t end) {
  if (pwrite(fd_, "", 1, static_cast<off_t>(end - 1)) != 1) throw failed(rank_, "cannot enlarge it");
}

uint64_t Segment::allocate(uint64_t first, size_t bytes) {
  const uint64_t rounded = (bytes + kRegionAlign - 1) / kRegionAlign * kRegionAlign;
  return first + header_->extra.fetch_add(rounded);
}

void Segment::release(uint64_t offset, size_t bytes) {
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

void Segment::hold_peers() {
  for (int r = 0; r < size_; ++r) {
    const int pid = lines_[r].pid.load(std::memory_order_acquire);
    if (r == rank_ || pid == 0 || pidfds_[r] != kUnheld) continue;
    const int fd = open_pidfd(pid);
    if (fd >= 0) pidfds_[r] = fd;
    if (fd < 0 && errno == ESRCH) pidfds_[r] = kDead;
  }
}

// A pidfd is readable as soon as the process has ended, even while it is a zombie, which kill(pid, 0) takes for alive;
// kill is for kernels and sandboxes without pidfds. All ranks must see the same process ids (one PID namespace).
bool Segment::died(int rank) const {
  const int fd = pidfds_[rank];
  if (fd == kDead) return true;
  if (fd == kUnheld) {
    const int pid = lines_[rank].pid.load(std::memory_order_acquire);
    return pid != 0 && kill(pid, 0) != 0 && errno == ESRCH;
  }
  pollfd ask{fd, POLLIN, 0};
  return poll(&ask, 1, 0) == 1;
}

void Segment::abort(int rank, const std::string& reason) {
  uint32_t none = 0;
  if (abort_->state.compare_exchange_strong(none, 1)) {
    abort_->rank = rank;
    const size_t length = std::min(reason.size(), sizeof abort_->text - 1);
    memcpy(abort_->text, reason.data(), length);
    abort_->text[length] = 0;
    abort_->state.store(2, std::memory_order_release);
  }
  raise_abort();
}

void Segment::raise_abort() {
  const int64_t start = now_ns();
  while (abort_->state.load(std::memory_order_acquire) != 2) {
    if (now_ns() - start > kSecond) throw CommError(rank_, "another rank failed, and while it said why it died");
    usleep(1000);
  }
  throw CommError(abort_->rank, abort_->text);
}

}  // namespace serried
