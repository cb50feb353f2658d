// A developer's tool: checks and times the pool and the collectives without Python. `make checks` builds and runs it.
//   comm_check check [RANKS]                      sums of all operations; as many ranks as you like
//   comm_check latency [RANKS]                    all-reduce of 1 KiB to 8 MiB: minimum and median, us
//   comm_check pool [THREADS]                     one run of the pool
//   comm_check steps RANKS COMPUTE_US NEIGHBOURS  all-reduces of 8 KiB between computations, beside busy processes
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "comm/shm.hpp"
#include "program/pool.hpp"

namespace {

using namespace serried;

constexpr size_t kSlot = size_t{1} << 20;
constexpr const char* kAlgorithms[] = {"one-shot", "two-shot", "ring"};

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::_Exit(1);
}

// Runs `body` in so many processes, this one being rank 0; whether all succeeded.
bool in_ranks(int size, const std::function<void(ShmComm&)>& body) {
  const int fd = memfd_create("comm-check", MFD_CLOEXEC);
  const auto run = [&](int rank) {
    try {
      ShmComm comm(fd, rank, size, kSlot, 20);
      require(comm.absent(20).empty(), "all ranks join");
      body(comm);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      return 1;
    }
    return 0;
  };
  std::fflush(stdout);
  for (int rank = 1; rank < size; ++rank) {
    if (fork() == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      std::_Exit(run(rank));
    }
  }
  bool good = run(0) == 0;
  for (int rank = 1, status; rank < size; ++rank) good &= wait(&status) > 0 && status == 0;
  close(fd);
  return good;
}

float value(int rank, int64_t i) { return static_cast<float>((i * 7 + rank * 13) % 101) / 7.0f; }

void check_all_reduce(ShmComm& comm) {
  for (const int64_t n : {1, 7, 1000, 262144, 600001}) {
    std::vector<float> first;
    for (const Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kRing}) {
      std::vector<float> x(n);
      for (int64_t i = 0; i < n; ++i) x[i] = value(comm.rank(), i);
      comm.all_reduce(x.data(), n, Element::kFloat32, algorithm);
      for (int64_t i = 0; i < n; ++i) {
        float total = value(0, i);
        for (int r = 1; r < comm.size(); ++r) total += value(r, i);
        const float far = algorithm == Algorithm::kRing ? 1e-5f * total : 0;
        require(std::abs(x[i] - total) <= far, "all_reduce");
      }
    }
  }
}

void check_moves(ShmComm& comm) {
  const int size = comm.size(), rank = comm.rank();
  std::vector<int64_t> parts(size);
  int64_t total = 0, before = 0;
  for (int r = 0; r < size; ++r) {
    parts[r] = (3 * r + 1) % 4 * 100'000;
    total += parts[r];
    if (r < rank) before += parts[r];
  }
  std::vector<char> own(3 * parts[rank], static_cast<char>(rank)), all(3 * total);
  comm.all_gather(own.data(), 3, parts.data(), all.data());
  for (int64_t row = 0, i = 0; row < 3; ++row) {
    for (int r = 0; r < size; ++r) {
      for (int64_t k = 0; k < parts[r]; ++k) require(all[i++] == r, "all_gather");
    }
  }
  std::vector<float> x(total), part(parts[rank]);
  for (int64_t i = 0; i < total; ++i) x[i] = value(rank, i);
  comm.reduce_scatter(x.data(), parts.data(), Element::kFloat32, part.data());
  for (int64_t i = 0; i < parts[rank]; ++i) {
    float sum = value(0, before + i);
    for (int r = 1; r < size; ++r) sum += value(r, before + i);
    require(part[i] == sum, "reduce_scatter");
  }
  for (int root = 0; root < size; ++root) {
    std::fill(all.begin(), all.end(), static_cast<char>(rank));
    comm.broadcast(all.data(), all.size(), root);
    require(std::count(all.begin(), all.end(), root) == static_cast<int64_t>(all.size()), "broadcast");
  }
  std::vector<int> around(100'000, rank), came(100'000);
  const auto send = [&] { comm.send(around.data(), 400'000, (rank + 1) % size); };
  const auto recv = [&] { comm.recv(came.data(), 400'000, (rank + size - 1) % size); };
  rank % 2 ? (recv(), send()) : (send(), recv());
  require(std::count(came.begin(), came.end(), (rank + size - 1) % size) == 100'000, "send, recv");
  require(comm.agree_min(100 - rank) == 101 - size, "agree_min");
}

void check_groups(ShmComm& comm) {
  std::vector<int> even, odd;
  for (int r = 0; r < comm.size(); ++r) (r % 2 ? odd : even).insert((r % 2 ? odd : even).begin(), r);
  for (const auto& ranks : {even, odd}) {
    const auto group = comm.subgroup(ranks);
    require((group != nullptr) == (comm.rank() % 2 == ranks[0] % 2), "subgroup");
    if (group) check_all_reduce(*group);
  }
  comm.barrier();
}

double median(std::vector<double>& times) {
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

void time_sizes(ShmComm& comm) {
  if (comm.rank() == 0) std::printf("%10s %24s %24s %24s\n", "bytes", kAlgorithms[0], kAlgorithms[1], kAlgorithms[2]);
  for (int64_t bytes = 1024; bytes <= 8 << 20; bytes *= 2) {
    std::vector<float> x(bytes / 4);
    if (comm.rank() == 0) std::printf("%10ld", bytes);
    for (int a = 0; a < 3; ++a) {
      const int turns = static_cast<int>(std::clamp<int64_t>((64 << 20) / bytes, 20, 2000));
      std::vector<double> times(turns);
      for (double& time : times) {
        std::fill(x.begin(), x.end(), 1.0f);
        comm.barrier();
        const int64_t start = now_ns();
        comm.all_reduce(x.data(), bytes / 4, Element::kFloat32, static_cast<Algorithm>(a));
        time = static_cast<double>(now_ns() - start) / 1000;
      }
      const double least = *std::min_element(times.begin(), times.end());
      if (comm.rank() == 0) std::printf("     min %6.1f  med %6.1f", least, median(times));
    }
    if (comm.rank() == 0) std::printf("\n");
  }
}

double cpu_seconds() {
  rusage use;
  getrusage(RUSAGE_SELF, &use);
  return static_cast<double>(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
         static_cast<double>(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6;
}

void time_pool(int threads) {
  Pool pool(threads);
  std::vector<double> times(20000);
  std::vector<int64_t> count(threads * 8);
  for (double& time : times) {
    const int64_t start = now_ns();
    pool.run([&](int thread, int) { ++count[thread * 8]; });
    time = static_cast<double>(now_ns() - start) / 1000;
  }
  for (int t = 0; t < threads; ++t) require(count[t * 8] == 20000, "pool");
  std::printf("pool of %d: min %.2f us, median %.2f us\n", threads, *std::min_element(times.begin(), times.end()),
              median(times));
  int caught = 0;
  for (int t = 0; t < threads; ++t) {
    try {
      pool.run([t](int thread, int) { if (thread == t) throw t; });
    } catch (int thrown) {
      caught += thrown == t;
    }
  }
  require(caught == threads, "exceptions of the pool");
  usleep(100'000);
  const double before = cpu_seconds();
  usleep(1'000'000);
  std::printf("idle: %.3f %% of a core\n", 100 * (cpu_seconds() - before));
}

void spin_for(int64_t iterations) {
  volatile uint64_t x = 1;
  for (int64_t i = 0; i < iterations; ++i) x = x * 3 + 1;
}

// Steps a second of ranks that share the work of one between all-reduces.
void time_steps(ShmComm& comm, double compute_us) {
  int64_t best = kSecond;
  for (int i = 0; i < 20; ++i) {
    const int64_t start = now_ns();
    spin_for(100'000);
    best = std::min(best, now_ns() - start);
  }
  const int64_t work = static_cast<int64_t>(compute_us * 1000 * 100'000 / static_cast<double>(best) / comm.size());
  std::vector<float> x(2048, 1.0f);
  comm.barrier();
  const int64_t start = now_ns();
  int turns = 0;
  for (; turns < 100'000; ++turns) {
    spin_for(work);
    int stop = now_ns() - start > 3 * kSecond ? 0 : 1;
    comm.broadcast(&stop, sizeof stop, 0);
    std::fill(x.begin(), x.end(), 1.0f);
    comm.all_reduce(x.data(), 2048, Element::kFloat32, Algorithm::kOneShot);
    if (!stop) break;
  }
  const double took = static_cast<double>(now_ns() - start) / 1000 / turns;
  if (comm.rank() == 0) std::printf("%d ranks: %.1f us a turn\n", comm.size(), took);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "check";
  const int number = argc > 2 ? std::atoi(argv[2]) : 2;
  if (what == "pool") {
    time_pool(number);
    return 0;
  }
  if (what == "latency") return in_ranks(number, time_sizes) ? 0 : 1;
  if (what == "steps" && argc > 4) {
    const double compute = std::atof(argv[3]);
    std::vector<pid_t> busy;
    for (int i = 0; i < std::atoi(argv[4]); ++i) {
      busy.push_back(fork());
      if (busy.back() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) spin_for(1000);
      }
    }
    const bool good = in_ranks(number, [compute](ShmComm& comm) { time_steps(comm, compute); });
    for (const pid_t pid : busy) kill(pid, SIGKILL);
    return good ? 0 : 1;
  }
  bool good = true;
  for (const auto& body : {check_all_reduce, check_moves, check_groups}) good &= in_ranks(number, body);
  std::puts(good ? "ok" : "failed");
  return good ? 0 : 1;
}
