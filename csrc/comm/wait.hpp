// How threads and ranks wait for each other: spin briefly, then give the core away, then sleep.
//
// Spinning alone is fastest on an idle machine, and three to ten times slower than this as soon as another process
// wants a core. std::atomic::wait cannot be used: it sleeps in a private futex, which no other process can wake.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

namespace serried {

constexpr int64_t kMicrosecond = 1000, kMillisecond = 1000 * kMicrosecond, kSecond = 1000 * kMillisecond;
constexpr int64_t kSpin = 4 * kMicrosecond;     // a peer that is only a little late
constexpr int64_t kYield = 200 * kMicrosecond;  // a peer that still computes; longer than a futex takes to wake us
constexpr int64_t kTaken = 50 * kMicrosecond;   // a yield as long as this: somebody else wants the core
constexpr int64_t kSleep = 50 * kMillisecond;   // the longest sleep between two looks around
constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * kSecond + t.tv_nsec;
}

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` is a no-op on most cores
#endif
}

// A number that one side publishes and others wait for. All zeros is its valid first state, so that it can live in a
// fresh shared segment. Sleepers register before the kernel compares the value, publishers look for them after they
// changed it, both sequentially consistent: one of the two sees the other, so a wake-up is never lost and a publisher
// pays for the system call only where somebody sleeps. (A sleeper killed while registered costs later publishers a
// needless call, no more.)
struct Signal {
  std::atomic<uint32_t> value;
  mutable std::atomic<uint32_t> sleepers;

  uint32_t load() const { return value.load(std::memory_order_acquire); }

  void publish(uint32_t next) {
    value.exchange(next, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
  }

  void wake() const {
    syscall(SYS_futex, address(), FUTEX_WAKE, std::numeric_limits<int32_t>::max(), nullptr, nullptr, 0);
  }

  // Returns when woken, after `timeout` ns, at once where the value is not `seen` any more, or for no reason.
  void sleep(uint32_t seen, int64_t timeout) const {
    timespec t{timeout / kSecond, timeout % kSecond};
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, address(), FUTEX_WAIT, seen, timeout == kForever ? nullptr : &t, nullptr, 0);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  uint32_t* address() const { return const_cast<uint32_t*>(reinterpret_cast<const uint32_t*>(&value)); }
};
static_assert(sizeof(Signal) == 8 && std::atomic<uint32_t>::is_always_lock_free);

// How many pauses fill kSpin: a pause takes from 10 to 150 cycles, depending on the make of the core.
inline int spin_rounds() {
  static const int rounds = [] {
    constexpr int kTrial = 64;
    int64_t best = kSecond;  // the minimum: a trial may be interrupted
    for (int i = 0; i < 8; ++i) {
      const int64_t start = now_ns();
      for (int k = 0; k < kTrial; ++k) cpu_pause();
      best = std::min(best, now_ns() - start);
    }
    return static_cast<int>(std::clamp<int64_t>(kSpin * kTrial / std::max<int64_t>(best, 1), 16, 4096));
  }();
  return rounds;
}

// One wait, which may be for several signals in turn: they share its patience.
class Waiter {
 public:
  // Returns when ready(value of the signal). Before each sleep look() is called: it says how many ns the sleep may
  // take, and throws to end the wait (a deadline, a dead peer). It is not called in waits that end before they sleep.
  template <class Ready, class Look>
  void until(const Signal& signal, Ready&& ready, Look&& look) {
    for (; rounds_ > 0; --rounds_) {
      if (ready(signal.load())) return;
      cpu_pause();
    }
    if (yielding_ && give_core_away(signal, ready)) return;
    for (;;) {
      const uint32_t seen = signal.load();
      if (ready(seen)) return;
      signal.sleep(seen, look());
    }
  }

 private:
  // Whether it became ready. Each yield forfeits our turn; with a neighbour on this core that soon costs milliseconds
  // a wait, where a sleeper keeps its claim on the core, or is woken on the other one, which our sleep has left idle.
  template <class Ready>
  bool give_core_away(const Signal& signal, Ready&& ready) {
    const int64_t until = now_ns() + kYield;
    for (int64_t now = until - kYield; now < until;) {
      if (ready(signal.load())) return true;
      sched_yield();
      const int64_t before = now;
      now = now_ns();
      if (now - before > kTaken) break;
    }
    yielding_ = false;
    return false;
  }

  int rounds_ = spin_rounds();
  bool yielding_ = true;
};

// A deadline that restarts whenever the progress of those who are awaited has moved.
class Deadline {
 public:
  explicit Deadline(int64_t patience) : patience_(patience) {}

  // Whether nothing has moved for `patience` ns; the first call starts the clock.
  bool passed(int64_t now, uint64_t progress) {
    if (start_ == 0 || progress != progress_) {
      start_ = now;
      progress_ = progress;
    }
    return now - start_ >= patience_;
  }

  int64_t left(int64_t now) const { return std::max<int64_t>(patience_ - (now - start_), kMillisecond); }

 private:
  int64_t patience_;
  int64_t start_ = 0;
  uint64_t progress_ = 0;
};

}  // namespace serried
