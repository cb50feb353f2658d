// A program: the operators of one rank's forward, recorded once, run again for every step.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/shm.hpp"
#include "kernels/kernels.hpp"
#include "program/buffers.hpp"
#include "program/pool.hpp"

namespace serried {

// The step's inputs; see serried/backends/step.py. All int32.
struct Step {
  const int32_t *tokens, *positions, *slots;
  const int32_t* row_starts;    // [sequences + 1]
  const int32_t* kv_lens;       // [sequences]
  const int32_t* block_starts;  // [sequences + 1]
  const int32_t* blocks;
  const int32_t* logit_rows;
  int32_t token_count, sequences, logit_count;
  float* logits;  // [logit_count, logits_stride]: where the LM head writes
  const int32_t* picks;  // [pick_count, Pick::kWords]: where tokens are to be chosen here, how, for each row of logits
  int32_t pick_count;
};

// How the token of a row is chosen: see serried/backends/picks.py. Six words; the last is not used.
struct Pick {
  double temperature;
  uint64_t seed;
  int32_t position;
  static constexpr int32_t kWords = 6;
};

// A weight in tiles, or a plain float32 vector (inputs == 0).
struct Weight {
  Format format;
  int64_t outputs;
  int64_t columns;  // real inputs
  int64_t inputs;   // padded
  void* data;
  int32_t tiles() const { return static_cast<int32_t>((outputs + kTile - 1) / kTile); }
  int64_t bytes() const { return tiles() * inputs * input_bytes(format); }
};

// How partial sums become a result: see serried/parallel/reduction.py.
struct Plan {
  std::vector<int32_t> counts;  // nodes of each rank
  std::vector<Add> adds;        // over the nodes of all ranks, in rank order
  int32_t result = 0;
  std::vector<Leaf> leaves;  // this rank's
  int32_t total() const {
    int32_t sum = 0;
    for (int32_t count : counts) sum += count;
    return sum;
  }
};

// Where a step's time went, in nanoseconds, since the last reset. wait: until the last peer arrived; exchange: what
// was done with the slots once all had.
struct Times {
  int64_t steps = 0, total = 0, wait = 0, exchange = 0;
};

class Program;

// One recorded operator.
class Operator {
 public:
  virtual ~Operator() = default;
  virtual void run(Program& program, const Step& step) = 0;
};

class Program {
 public:
  // two_shot_from, apart_from: bytes (of the rank with most) from which a reduction goes in two shots, and from which
  // the rows of its residual stay apart (see reduce_operator.hpp). dtype: of activations.
  Program(const Kernels& kernels, Pool& pool, ShmComm* comm, int64_t max_tokens, int64_t max_logit_rows,
          int64_t two_shot_from, int64_t apart_from, Dtype dtype);

  // Recording: each makes an operator and gives the number of the buffer that it writes. What a norm, gated or columns
  // writes is open until its first consumer says what it takes: a linear the dtype that its weight multiplies with.
  int embed(const Weight& weight, const std::vector<int32_t>& edges, float scale);
  int norm(int x, const Weight& weight, float eps);
  int linear(int x, const Weight& weight, const Weight* bias);
  int linear_nodes(int x, const Weight& weight, const Plan& plan);
  int reduce(int nodes, const Plan& plan, const Weight* bias, int64_t columns);
  int reduce_add_norm(int nodes, const Plan& plan, const Weight* bias, int residual, const Weight& weight, float eps);
  int norm_add_norm(int x, const Weight& inner, int residual, const Weight& weight, float eps);
  int activation(int x, Activation kind);
  int gated(int gate_up, Activation kind);
  int attention(int qkv, const Attention& attention, const std::vector<int32_t>& kv_map);
  int columns(int x, int64_t start, int64_t stop);
  int gather_columns(int x, const std::vector<int64_t>& parts);
  int select_rows(int x);
  void logits(int x, const Weight& weight, float softcap);
  // The dtype of a buffer; the program's own where nobody has said yet.
  Dtype dtype(int x) { return settle(x, dtype_); }

  // Gives the buffers their memory; nothing can be recorded after that.
  void finish();
  void run(const Step& step);

  Times times;

  // For operators.
  const Kernels& k;
  Pool& pool;
  ShmComm* comm;
  const int64_t two_shot_from, apart_from;
  Buffer& buffer(int index) { return buffers_[static_cast<size_t>(index)]; }
  const Buffer& buffer(int index) const { return buffers_[static_cast<size_t>(index)]; }
  int rank() const { return comm ? comm->rank() : 0; }
  int ranks() const { return comm ? comm->size() : 1; }
  int64_t buffer_bytes() const;
  size_t operators() const { return operators_.size(); }

 private:
  int make(Dtype dtype, int64_t columns, bool padded, bool logit_rows = false);
  int make_open(int64_t columns, bool logit_rows = false);
  Dtype settle(int x, Dtype wanted);
  int ready(int x, Dtype dtype);
  const Buffer& wide(int x, const char* what);
  void use(int index, bool whole = true);
  template <class Op>
  void record(std::vector<int> reads, Op op);

  int64_t max_tokens_, max_logit_rows_;
  Dtype dtype_;
  bool finished_ = false;
  std::vector<Buffer> buffers_;
  std::vector<std::unique_ptr<Operator>> operators_;
  std::vector<std::unique_ptr<std::vector<int32_t>>> kv_maps_;
  Arena arena_;
};

}  // namespace serried
