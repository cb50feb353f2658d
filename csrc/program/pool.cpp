#include "program/pool.hpp"

#include <pthread.h>

#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace serried {

namespace {

void wait_until_at(const Signal& signal, uint32_t turn) {
  Waiter().until(signal, [turn](uint32_t value) { return value == turn; }, [] { return kForever; });
}

}  // namespace

Pool::Pool(int threads, std::vector<int> cpus, void (*begin)())
    : threads_(threads), caller_cpu_(cpus.empty() ? -1 : cpus[0]), workers_(std::make_unique<Worker[]>(threads)) {
  if (threads < 1) throw std::invalid_argument("a pool needs at least one thread");
  try {
    for (int i = 1; i < threads; ++i) {
      workers_[i].thread = std::thread(&Pool::work, this, i, begin);
      pthread_setname_np(workers_[i].thread.native_handle(), ("serried-" + std::to_string(i)).c_str());
      if (!cpus.empty()) bind(i, cpus[i % cpus.size()]);
    }
  } catch (...) {
    end();
    throw;
  }
}

Pool::~Pool() { end(); }

void Pool::end() {
  work_.call = nullptr;
  work_.turn.publish(work_.turn.load() + 1);
  for (int i = 1; i < threads_; ++i) {
    if (workers_[i].thread.joinable()) workers_[i].thread.join();
  }
}

void Pool::bind(int thread, int cpu) {
  if (cpu < 0 || cpu >= CPU_SETSIZE) throw std::invalid_argument("no such core: " + std::to_string(cpu));
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  const int error = pthread_setaffinity_np(workers_[thread].thread.native_handle(), sizeof set, &set);
  if (error) throw std::system_error(error, std::generic_category(), "cannot bind to core " + std::to_string(cpu));
}

void Pool::run_all(Call call, const void* body) {
  work_.call = call;
  work_.body = body;
  const uint32_t turn = work_.turn.load() + 1;
  work_.turn.publish(turn);
  this->call(0);
  for (int i = 1; i < threads_; ++i) wait_until_at(workers_[i].done, turn);
  if (failed_.load(std::memory_order_relaxed)) {
    failed_.store(false, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void Pool::work(int thread, void (*begin)()) {
  if (begin) begin();
  for (uint32_t turn = 1;; ++turn) {
    wait_until_at(work_.turn, turn);
    if (!work_.call) return;
    call(thread);
    workers_[thread].done.publish(turn);
  }
}

void Pool::call(int thread) {
  try {
    work_.call(work_.body, thread, threads_);
  } catch (...) {
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
}

}  // namespace serried
