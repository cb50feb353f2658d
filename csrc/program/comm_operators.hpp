// The operators in which the ranks meet. A group of one takes the same code with its own memory for the only slot.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "comm/region.hpp"
#include "program/operators.hpp"

namespace serried {

// Runs one exchange: write(slot) fills this rank's slot, then read(peers) uses all ranks' slots. more: see begin.
template <class Write, class Read>
void exchange(Program& p, Op op, size_t bytes, bool more, Write&& write, Read&& read) {
  write(static_cast<char*>(p.comm->begin(op, bytes, more)));
  p.comm->post();
  const int64_t before = now_ns();
  p.comm->wait();
  const int64_t arrived = now_ns();
  p.times.wait += arrived - before;
  read();
  p.comm->end();
  p.times.exchange += now_ns() - arrived;
}

// The embeddings of the step's tokens: each rank brings the rows that it owns, everybody takes each from its owner.
struct EmbedOp final : Operator {
  int y;
  Weight weight;
  std::vector<int32_t> edges;  // where each rank's rows of the vocabulary begin, and where the last one's end
  float scale;

  void run(Program& p, const Step& step) override {
    const Buffer& out = p.buffer(y);
    if (p.ranks() == 1) {
      for (int32_t t = 0; t < step.token_count; ++t) look_up(p, step.tokens[t], out.row<float>(t));
      return;
    }
    const auto columns = static_cast<size_t>(weight.columns);
    const auto piece = static_cast<int32_t>(std::max<size_t>(1, p.comm->slot_bytes() / (columns * sizeof(float))));
    for (int32_t first = 0; first < step.token_count; first += piece) {
      const int32_t last = std::min(step.token_count, first + piece);
      const auto at = [&](const char* slot, int32_t t) {
        return const_cast<float*>(reinterpret_cast<const float*>(slot)) + static_cast<size_t>(t - first) * columns;
      };
      exchange(
          p, Op::kAllReduce, static_cast<size_t>(last - first) * columns * sizeof(float), first > 0,
          [&](char* slot) {
            for (int32_t t = first; t < last; ++t)
              if (owner(step.tokens[t]) == p.rank()) look_up(p, step.tokens[t], at(slot, t));
          },
          [&] {
            for (int32_t t = first; t < last; ++t) {
              const auto* from = at(static_cast<const char*>(p.comm->peer(owner(step.tokens[t]))), t);
              std::memcpy(out.row<float>(t), from, columns * sizeof(float));
            }
          });
    }
  }

 private:
  int owner(int32_t token) const {
    return static_cast<int>(std::upper_bound(edges.begin() + 1, edges.end() - 1, token) - edges.begin()) - 1;
  }
  void look_up(Program& p, int32_t token, float* out) const {
    const int64_t row = token - edges[static_cast<size_t>(p.rank())];
    p.k.unpack_row(weight.data, weight.format, static_cast<int32_t>(weight.inputs), row, out, weight.columns);
    if (scale == 1.0f) return;
    for (int64_t i = 0; i < weight.columns; ++i) out[i] *= scale;
  }
};

// Folds the nodes of all ranks in the plan's order; then residual and norm, or (no residual) the fold alone. Nodes go
// into slots as [node][token][column], so that all slots have one stride. Long messages go in pieces of a slot.
struct ReduceOp final : Operator {
  int nodes, residual, y;
  Plan plan;
  ReduceAddNorm args;

  void run(Program& p, const Step& step) override {
    args.adds = plan.adds.data();
    p.ranks() == 1 ? alone(p, step) : together(p, step);
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
    p.comm->post();
    p.comm->wait();
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

 public:
  static constexpr int32_t kMaxSlots = 128;
};

// The columns of all ranks side by side (gather_output).
struct GatherColumnsOp final : Operator {
  int x, y;
  std::vector<int64_t> parts;

  void run(Program& p, const Step& step) override {
    const Buffer &in = p.buffer(x), &out = p.buffer(y);
    const int64_t most = *std::max_element(parts.begin(), parts.end()), own = parts[static_cast<size_t>(p.rank())];
    const int64_t piece = std::max<int64_t>(1, static_cast<int64_t>(p.comm->slot_bytes() / sizeof(float)) / most);
    for (int64_t first = 0; first < step.token_count; first += piece) {
      const int64_t rows = std::min<int64_t>(piece, step.token_count - first);
      exchange(
          p, Op::kAllGather, static_cast<size_t>(rows * own) * sizeof(float), first > 0,
          [&](char* slot) { copy(in.row<float>(first), in.stride, reinterpret_cast<float*>(slot), own, own, rows); },
          [&] {
            int64_t column = 0;
            for (int rank = 0; rank < p.ranks(); ++rank) {
              const int64_t width = parts[static_cast<size_t>(rank)];
              copy(static_cast<const float*>(p.comm->peer(rank)), width, out.row<float>(first) + column, out.stride,
                   width, rows);
              column += width;
            }
          });
    }
  }

 private:
  static void copy(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t width, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(to + r * to_stride, from + r * from_stride, static_cast<size_t>(width) * sizeof(float));
  }
};

}  // namespace serried
