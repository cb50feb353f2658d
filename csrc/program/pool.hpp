// A rank's own threads: one piece of work at a time, all of them on it, started and ended in about a microsecond.
#pragma once
#include <exception>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "comm/wait.hpp"

namespace serried {

// The thread that calls run() is thread 0, so a pool of one thread has none of its own. The pool does not bind it to a
// core: threads that libraries start later would inherit the mask. (A program binds it for the time of a step.) Threads that have no work sleep. One run at a time.
class Pool {
 public:
  // cpus: thread i > 0 is bound to cpus[i % size]; empty: none is bound. begin: called once by each thread but thread
  // 0, whose caller sees to it himself (it may have to put back what it found). Throws std::system_error where a
  // thread cannot be started or bound.
  explicit Pool(int threads, std::vector<int> cpus = {}, void (*begin)() = nullptr);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  // The core that is left for the calling thread while it works; -1: any.
  int caller_cpu() const { return caller_cpu_; }

  // f(thread, threads) on every thread; returns when all are done. The first exception comes out here, after that.
  template <class F>
  void run(F&& f) {
    using Body = std::remove_reference_t<F>;
    if (threads_ == 1) {
      f(0, 1);
      return;
    }
    const auto call = [](const void* body, int thread, int threads) {
      (*static_cast<Body*>(const_cast<void*>(body)))(thread, threads);
    };
    run_all(call, std::addressof(f));
  }

 private:
  using Call = void (*)(const void* body, int thread, int threads);

  // One cache line: a thread that sees a new turn has the work with it.
  struct alignas(64) Work {
    Signal turn;
    Call call;  // null: the end
    const void* body;
  };
  struct alignas(64) Worker {
    Signal done;  // the last turn that this thread has finished
    std::thread thread;
  };

  void run_all(Call call, const void* body);
  void work(int thread, void (*begin)());
  void call(int thread);
  void bind(int thread, int cpu);
  void end();

  const int threads_;
  const int caller_cpu_;
  Work work_{};
  std::unique_ptr<Worker[]> workers_;
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace serried
