// The operators in which the ranks meet, but reductions.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "program/exchange.hpp"

namespace serried {

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
