// The choice of tokens where one candidate of each rank is enough: the largest logit, or the largest noisy one.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "program/comm_operators.hpp"

namespace serried {

constexpr int64_t kNoToken = -1;  // where none may be chosen: every logit is -inf, or none is a number

// A rank's part of the logits: [rows, stride], of which the first `own` columns are tokens, from the id `first` on.
struct OwnLogits {
  const float* data;
  int64_t stride, own, first;
};

// What a rank offers for one row.
struct Candidate {
  int64_t token;
  double score;
};

constexpr Candidate kNothing{kNoToken, -std::numeric_limits<double>::infinity()};

// The first of equals, so the lowest id; a score that is no number is never better.
inline Candidate better(const Candidate& a, const Candidate& b) { return b.score > a.score ? b : a; }

// For each row the token of the largest logit (temperature 0) or of the largest noisy one, and its value. Rows are
// shared among the pool's threads. of(row): its Pick.
template <class Of>
void pick_rows(Program& p, const OwnLogits& logits, int64_t rows, Of&& of, Candidate* best) {
  const auto some = [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const float* x = logits.data + row * logits.stride;
      const Pick pick = of(row);
      Candidate& c = best[row];
      if (pick.temperature > 0) {
        p.k.gumbel_argmax(x, logits.own, logits.first, pick.temperature, pick.seed,
                          static_cast<uint32_t>(pick.position), &c.token, &c.score);
      } else {
        float value = 0;
        p.k.argmax(x, logits.own, &c.token, &value);
        c.score = value;
      }
      c.token += logits.first;
    }
  };
  if (rows == 1) {
    some(0, 1);  // not worth another thread's waking
    return;
  }
  p.pool.run([&](int thread, int threads) {
    const auto [begin, end] = share(rows, thread, threads);
    some(begin, end);
  });
}

// Takes from each row the best candidate of all ranks, on rank 0.
inline void gather_best(Program& p, const Candidate* mine, int64_t rows, int64_t* tokens) {
  const auto piece = static_cast<int64_t>(p.comm->slot_bytes() / sizeof(Candidate));
  for (int64_t at = 0; at < rows; at += piece) {
    const int64_t end = std::min(rows, at + piece);
    const size_t bytes = static_cast<size_t>(end - at) * sizeof(Candidate);
    exchange(
        p, Op::kGather, bytes, at > 0, [&](char* slot) { std::memcpy(slot, mine + at, bytes); },
        [&] {
          for (int64_t row = at; p.rank() == 0 && row < end; ++row) {
            Candidate best = kNothing;
            for (int r = 0; r < p.ranks(); ++r) best = better(best, static_cast<const Candidate*>(p.comm->peer(r))[row - at]);
            tokens[row] = best.token;
          }
        });
  }
}

// Runs a step and chooses the token of each row of logits, on rank 0. own, first: how many rows of the vocabulary this
// rank has, and the first one's id. tokens: [logit_count]; untouched on the other ranks.
inline void choose(Program& p, const Step& step, int64_t own, int64_t first, int64_t* tokens) {
  if (step.pick_count != step.logit_count) throw std::invalid_argument("a step that does not say how to choose");
  p.run(step);
  const int64_t start = now_ns(), rows = step.logit_count;
  const auto of = [&](int64_t row) {
    Pick pick;
    const int32_t* words = step.picks + row * Pick::kWords;
    std::memcpy(&pick.temperature, words, sizeof pick.temperature);
    std::memcpy(&pick.seed, words + 2, sizeof pick.seed);
    pick.position = words[4];
    return pick;
  };
  std::vector<Candidate> best(static_cast<size_t>(rows), kNothing);
  if (own) pick_rows(p, {step.logits, round_up(own, kTile), own, first}, rows, of, best.data());
  if (p.ranks() > 1) {
    gather_best(p, best.data(), rows, tokens);
  } else {
    for (int64_t row = 0; row < rows; ++row) tokens[row] = better(kNothing, best[static_cast<size_t>(row)]).token;
  }
  p.times.total += now_ns() - start;
}

}  // namespace serried
