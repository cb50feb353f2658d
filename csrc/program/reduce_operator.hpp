// The reduction of row-parallel linears: the only place where partial sums of several ranks are added.
#pragma once
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "program/exchange.hpp"

namespace serried {

// Folds the nodes of all ranks in the plan's order; then residual and norm, or (no residual) the fold alone. Nodes go
// into slots as [node][token][column], so that all slots have one stride. Long messages go in pieces of a slot.
//
// The rows of a residual that only reductions read may stay apart: rank r keeps those of share(tokens, r, ranks), folds,
// adds and normalizes them alone, and everybody takes the result from it, which in bf16 is half of what the sums are.
// That is sequence parallelism (Korthikanti et al. 2022): a reduce-scatter, the norm, an all-gather. No bit changes.
// Of a prompt, the rows that others keep are computed first, into the slot; they can be read while the own ones are.
struct ReduceOp final : Operator, Taker {
  int nodes, residual, y;
  LinearOp* source = nullptr;  // what the nodes come from, if nothing stands between
  Plan plan;
  ReduceAddNorm args;

  void run(Program& p, const Step& step) override {
    args.adds = plan.adds.data();
    if (p.ranks() == 1) return alone(p, step);
    stays_apart(p, step) ? apart(p, step) : together(p, step);
  }

  bool asks_for_rows(const Program& p, const Step& step) const override {
    return p.ranks() > 1 && step.token_count >= p.ranks() * kPrompt && stays_apart(p, step) && Apart(p, *this).direct;
  }

 private:
  void finish(Program& p, const ReduceAddNorm& how, const float* const* slots, int64_t stride, int64_t row,
              int64_t rows) {
    const Buffer& out = p.buffer(y);
    if (residual < 0) {
      p.k.fold(how, slots, stride, out.row<float>(row), out.stride, rows);
    } else {
      const Buffer& r = p.buffer(residual);
      p.k.reduce_add_norm(how, slots, stride, r.row<float>(row), r.stride, out.row<char>(row), out.dtype, out.stride,
                          rows);
    }
  }

  // Folds rows [0, rows) of the slots into rows from `first` on, shared among the threads.
  void fold_all(Program& p, const float* const* slots, int64_t stride, int64_t first, int64_t rows) {
    over_rows(p.pool, rows, args.columns * args.count, [&](int64_t a, int64_t b) {
      const float* moved[kMaxSlots];
      for (int32_t s = 0; s < args.count; ++s) moved[s] = slots[s] + a * stride;
      finish(p, args, moved, stride, first + a, b - a);
    });
  }

  void alone(Program& p, const Step& step) {
    const Buffer& in = p.buffer(nodes);
    const int64_t width = in.stride / args.count;
    const float* slots[kMaxSlots];
    for (int32_t s = 0; s < args.count; ++s) slots[s] = in.row<float>(0) + s * width;
    fold_all(p, slots, in.stride, 0, step.token_count);
  }

  void together(Program& p, const Step& step) {
    const int32_t most = *std::max_element(plan.counts.begin(), plan.counts.end());
    const auto row = static_cast<size_t>(args.columns) * sizeof(float);
    const auto piece = static_cast<int64_t>(p.comm->slot_bytes() / (row * static_cast<size_t>(most)));
    for (int64_t first = 0; first < step.token_count; first += piece) {
      const int64_t rows = std::min<int64_t>(piece, step.token_count - first);
      const bool two_shot = static_cast<int64_t>(row) * rows * most >= p.two_shot_from;
      exchange(
          p, Op::kReduceNodes, row * static_cast<size_t>(rows * own(p)), first > 0,
          [&](char* slot) { bring(p, slot, first, rows); },
          [&] {
            const float* slots[kMaxSlots];
            int32_t s = 0;
            for (int rank = 0; rank < p.ranks(); ++rank)
              for (int32_t n = 0; n < plan.counts[static_cast<size_t>(rank)]; ++n)
                slots[s++] = static_cast<const float*>(p.comm->peer(rank)) + n * rows * args.columns;
            two_shot ? share_fold(p, slots, first, rows) : fold_all(p, slots, args.columns, first, rows);
          });
    }
  }

  int32_t own(const Program& p) const { return plan.counts[static_cast<size_t>(p.rank())]; }

  // This rank's nodes of some rows, node by node.
  void bring(Program& p, char* slot, int64_t first, int64_t rows) {
    const Buffer& in = p.buffer(nodes);
    const auto row = static_cast<size_t>(args.columns) * sizeof(float);
    const int64_t width = own(p) ? in.stride / own(p) : 0;
    over_rows(p.pool, rows, args.columns * own(p), [&](int64_t a, int64_t b) {
      for (int32_t n = 0; n < own(p); ++n)
        for (int64_t r = a; r < b; ++r)
          std::memcpy(slot + static_cast<size_t>(n * rows + r) * row, in.row<float>(first + r) + n * width, row);
    });
  }

  // The second shot: each rank folds a share of the rows (the bias goes in there) and everybody takes all shares. The
  // same additions in the same order as in one shot.
  void share_fold(Program& p, const float* const* slots, int64_t first, int64_t rows) {
    const int64_t columns = args.columns;
    const auto part = [&](int rank) { return share(rows, rank, p.ranks()); };
    const auto [begin, end] = part(p.rank());
    auto* mine = static_cast<float*>(p.comm->next());
    over_rows(p.pool, end - begin, columns * args.count, [&, start = begin](int64_t a, int64_t b) {
      const float* moved[kMaxSlots];
      for (int32_t s = 0; s < args.count; ++s) moved[s] = slots[s] + (start + a) * columns;
      p.k.fold(args, moved, columns, mine + a * columns, columns, b - a);
    });
    meet(p);
    ReduceAddNorm whole = args;  // nothing left to add but the residual
    whole.add_count = 0, whole.count = 1, whole.result = 0, whole.bias = nullptr;
    for (int rank = 0; rank < p.ranks(); ++rank) {
      const auto [from, to] = part(rank);
      const auto* folded = static_cast<const float*>(p.comm->peer(rank));
      over_rows(p.pool, to - from, columns, [&, start = from](int64_t a, int64_t b) {
        const float* slot = folded + a * columns;
        finish(p, whole, &slot, columns, first + start + a, b - a);
      });
    }
  }

  // All reductions of one residual must say the same, on all ranks.
  bool stays_apart(const Program& p, const Step& step) const {
    if (residual < 0) return false;
    const Buffer& r = p.buffer(residual);
    const int64_t token = r.widest * args.columns * int64_t{sizeof(float)};
    return !r.whole && token * p.ranks() <= static_cast<int64_t>(p.comm->slot_bytes()) &&
           token * step.token_count >= p.apart_from;
  }

  // Rows of the step: those that a rank keeps, in one piece.
  struct Part {
    int64_t begin, end;
    int64_t rows() const { return end - begin; }
  };

  // Where the nodes lie that go from rank to rank. direct: a rank's own need not go anywhere, since they have the
  // stride of a slot. piece: rows of each rank at once.
  struct Apart {
    size_t row;
    int64_t piece;
    bool direct;
    const std::vector<int32_t>& counts;

    Apart(const Program& p, const ReduceOp& op)
        : row(static_cast<size_t>(op.args.columns) * sizeof(float)), counts(op.plan.counts) {
      const int32_t most = *std::max_element(counts.begin(), counts.end());
      direct = most == 1 && *std::min_element(counts.begin(), counts.end()) == 1 && op.args.columns % kTile == 0;
      const Buffer& out = p.buffer(op.y);
      const auto blocks = static_cast<size_t>(p.ranks() - direct);
      const size_t sums = row * static_cast<size_t>(most) * blocks;
      const auto result = static_cast<size_t>(row_bytes(out.dtype, out.stride));
      piece = static_cast<int64_t>(p.comm->slot_bytes() / std::max(sums, result));
    }
    size_t offset(int from, int to) const {
      const auto block = static_cast<size_t>(direct && to > from ? to - 1 : to);
      return block * static_cast<size_t>(piece * counts[static_cast<size_t>(from)]) * row;
    }
  };

  void apart(Program& p, const Step& step) {
    const Apart how(p, *this);
    const bool asked = source && asks_for_rows(p, step);
    const int64_t longest = (step.token_count + p.ranks() - 1) / p.ranks();
    std::vector<Part> parts(static_cast<size_t>(p.ranks()));
    for (int64_t first = 0; first < longest; first += how.piece) {
      int64_t brought = 0;
      for (int rank = 0; rank < p.ranks(); ++rank) {
        const auto [begin, end] = share(step.token_count, rank, p.ranks());
        const Part part{std::min(begin + first, end), std::min(begin + first + how.piece, end)};
        parts[static_cast<size_t>(rank)] = part;
        if (!how.direct || rank != p.rank()) brought += part.rows();
      }
      const Part& mine = parts[static_cast<size_t>(p.rank())];
      exchange(
          p, Op::kReduceNodes, static_cast<size_t>(brought * own(p)) * how.row, first > 0,
          [&](char* slot) { bring_parts(p, how, parts, asked, slot); },
          [&] {
            if (asked) source->rows(p, mine.begin, mine.end, p.buffer(nodes).row<float>(mine.begin), args.columns);
          },
          [&] { fold_part(p, how, mine), share_part(p, parts); });
    }
  }

  // The nodes of the rows that others keep, for each of them.
  void bring_parts(Program& p, const Apart& how, const std::vector<Part>& parts, bool asked, char* slot) {
    for (int rank = 0; rank < p.ranks(); ++rank) {
      if (how.direct && rank == p.rank()) continue;
      const Part& part = parts[static_cast<size_t>(rank)];
      char* to = slot + how.offset(p.rank(), rank);
      if (asked) source->rows(p, part.begin, part.end, reinterpret_cast<float*>(to), args.columns);
      else bring(p, to, part.begin, part.rows());
    }
  }

  void fold_part(Program& p, const Apart& how, const Part& mine) {
    const float* slots[kMaxSlots];
    int32_t s = 0;
    for (int rank = 0; rank < p.ranks(); ++rank) {
      const bool here = how.direct && rank == p.rank();
      const char* from = here ? p.buffer(nodes).row<char>(mine.begin)
                              : static_cast<const char*>(p.comm->peer(rank)) + how.offset(rank, p.rank());
      for (int32_t n = 0; n < plan.counts[static_cast<size_t>(rank)]; ++n)
        slots[s++] = reinterpret_cast<const float*>(from) + n * mine.rows() * args.columns;
    }
    fold_all(p, slots, args.columns, mine.begin, mine.rows());
  }

  // Everybody takes what the others have made of their rows.
  void share_part(Program& p, const std::vector<Part>& parts) {
    const Buffer& out = p.buffer(y);
    const auto at = [&](int rank) { return out.row<char>(parts[static_cast<size_t>(rank)].begin); };
    const auto rows = [&](int rank) { return parts[static_cast<size_t>(rank)].rows(); };
    copy_rows(p, static_cast<char*>(p.comm->next()), at(p.rank()), rows(p.rank()));
    meet(p);
    for (int rank = 0; rank < p.ranks(); ++rank)
      if (rank != p.rank()) copy_rows(p, at(rank), static_cast<const char*>(p.comm->peer(rank)), rows(rank));
  }

  void copy_rows(Program& p, char* to, const char* from, int64_t rows) {
    const Buffer& out = p.buffer(y);
    const int64_t bytes = row_bytes(out.dtype, out.stride);
    over_rows(p.pool, rows, out.columns, [&](int64_t a, int64_t b) {
      std::memcpy(to + a * bytes, from + a * bytes, static_cast<size_t>((b - a) * bytes));
    });
  }

 public:
  static constexpr int32_t kMaxSlots = 128;
  static constexpr int32_t kPrompt = 128;  // rows of a rank from which reading its weights again costs nothing
};

}  // namespace serried
