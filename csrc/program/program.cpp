#include "program/program.hpp"

#include <sched.h>

#include <algorithm>
#include <stdexcept>
#include <utility>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "program/comm_operators.hpp"
#include "program/operators.hpp"
#include "program/reduce_operator.hpp"

namespace serried {
namespace {

// The calling thread is Python's: it computes as the pool's threads do (denormals are zero) and is put back after.
class FloatingPointMode {
 public:
  explicit FloatingPointMode(const Kernels& k) {
#if defined(__x86_64__)
    before_ = _mm_getcsr();
#endif
    k.begin_thread();
  }
  ~FloatingPointMode() {
#if defined(__x86_64__)
    _mm_setcsr(before_);
#endif
  }
  FloatingPointMode(const FloatingPointMode&) = delete;
  FloatingPointMode& operator=(const FloatingPointMode&) = delete;

 private:
  unsigned before_ = 0;
};

// The calling thread stays on the core that the pool has left for it, for the time of a step: elsewhere it could share
// one with a bound thread of the pool, which halves the speed. It gets its own mask back, for what it starts later.
class OnItsCore {
 public:
  explicit OnItsCore(int cpu) {
    if (cpu < 0 || sched_getaffinity(0, sizeof before_, &before_) != 0) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<size_t>(cpu), &one);
    bound_ = sched_setaffinity(0, sizeof one, &one) == 0;
  }
  ~OnItsCore() {
    if (bound_) sched_setaffinity(0, sizeof before_, &before_);
  }
  OnItsCore(const OnItsCore&) = delete;
  OnItsCore& operator=(const OnItsCore&) = delete;

 private:
  cpu_set_t before_;
  bool bound_ = false;
};

}  // namespace

Program::Program(const Kernels& kernels, Pool& pool, ShmComm* comm, int64_t max_tokens, int64_t max_logit_rows,
                 int64_t two_shot_from, int64_t apart_from, Dtype dtype)
    : k(kernels),
      pool(pool),
      comm(comm),
      two_shot_from(two_shot_from),
      apart_from(apart_from),
      max_tokens_(max_tokens),
      max_logit_rows_(max_logit_rows),
      dtype_(dtype) {}

int Program::make(Dtype dtype, int64_t columns, bool padded, bool logit_rows) {
  Buffer buffer{};
  buffer.dtype = dtype;
  buffer.twin = -1;
  buffer.columns = columns;
  buffer.stride = round_up(columns, kTile);
  buffer.rows = logit_rows ? max_logit_rows_ : max_tokens_;
  buffer.logit_rows = logit_rows;
  buffer.padded = padded || buffer.stride == columns;
  buffers_.push_back(buffer);
  return static_cast<int>(buffers_.size()) - 1;
}

// A buffer whose dtype its first consumer will settle; with zeros after its columns.
int Program::make_open(int64_t columns, bool logit_rows) {
  const int y = make(dtype_, columns, true, logit_rows);
  buffer(y).open = true;
  return y;
}

// The dtype of x: what is wanted, if nobody has wanted another one before.
Dtype Program::settle(int x, Dtype wanted) {
  Buffer& b = buffer(x);
  if (!b.open) return b.dtype;
  b.open = false;
  return b.dtype = b.twin < 0 ? wanted : settle(b.twin, wanted);
}

// x as a linear takes it: in the dtype that it multiplies with, with zeros after its columns.
int Program::ready(int x, Dtype dtype) {
  if (settle(x, dtype) == dtype && buffer(x).padded) return x;
  const int y = columns(x, 0, buffer(x).columns);
  settle(y, dtype);
  return y;
}

// x, which must be float32.
const Buffer& Program::wide(int x, const char* what) {
  if (settle(x, Dtype::kFloat32) != Dtype::kFloat32) throw std::invalid_argument(std::string(what) + " takes float32");
  return buffer(x);
}

// whole: whoever uses it needs all rows.
void Program::use(int index, bool whole) {
  Buffer& buffer = buffers_.at(static_cast<size_t>(index));
  if (whole && buffer.widest) buffer.whole = true;
  const int now = static_cast<int>(operators_.size());
  if (buffer.first_use < 0) buffer.first_use = now;
  buffer.last_use = now;
}

template <class Op>
void Program::record(std::vector<int> touched, Op op) {
  if (finished_) throw std::logic_error("the program is finished; nothing more can be recorded");
  for (int index : touched) use(index);
  operators_.push_back(std::make_unique<Op>(std::move(op)));
}

int Program::embed(const Weight& weight, const std::vector<int32_t>& edges, float scale) {
  const int y = make(Dtype::kFloat32, weight.columns, false);
  EmbedOp op;
  op.y = y, op.weight = weight, op.edges = edges, op.scale = scale;
  record({y}, std::move(op));
  return y;
}

int Program::norm(int x, const Weight& weight, float eps) {
  const int y = make_open(wide(x, "norm").columns);
  NormOp op;
  op.x = x, op.y = y, op.weight = static_cast<const float*>(weight.data), op.eps = eps;
  record({x, y}, std::move(op));
  return y;
}

int Program::linear(int x, const Weight& weight, const Weight* bias) {
  Plan whole;
  whole.leaves = {Leaf{0, static_cast<int32_t>(weight.inputs), 0, 1}};
  const int y = linear_nodes(x, weight, whole);
  auto& op = static_cast<LinearOp&>(*operators_.back());
  if (bias) op.linear.bias = static_cast<const float*>(bias->data);
  Buffer& out = buffer(y);
  out.columns = weight.outputs;
  out.padded = out.stride == out.columns;
  return y;
}

int Program::linear_nodes(int given, const Weight& weight, const Plan& plan) {
  int32_t nodes = 0;
  for (const Leaf& leaf : plan.leaves) nodes += leaf.ends_node;
  const int64_t width = int64_t{weight.tiles()} * kTile;
  const int x = nodes ? ready(given, input_of(weight.format)) : given;
  const int y = make(Dtype::kFloat32, width * nodes, false);
  LinearOp op;
  op.x = x, op.y = y, op.format = weight.format, op.leaves = plan.leaves;
  op.linear = Linear{weight.data, nullptr,           nullptr, static_cast<int32_t>(plan.leaves.size()),
                     nodes,       static_cast<int32_t>(weight.inputs), weight.tiles()};
  if (nodes == 0) return y;  // a rank without a part of this dimension brings nothing
  record({x, y}, std::move(op));
  return y;
}

namespace {

// What a rank brings of one token must fit a slot.
void check_slot(const ShmComm* comm, int64_t floats) {
  if (comm && static_cast<size_t>(floats) * sizeof(float) > comm->slot_bytes())
    throw std::invalid_argument("one token's partial sums do not fit a slot of the shared segment");
}

ReduceOp reduction(const ShmComm* comm, int nodes, const Plan& plan, const Weight* bias, int64_t columns) {
  if (plan.total() > ReduceOp::kMaxSlots) throw std::invalid_argument("a reduction of more than 128 nodes");
  check_slot(comm, columns * *std::max_element(plan.counts.begin(), plan.counts.end()));
  ReduceOp op;
  op.nodes = nodes, op.residual = -1, op.plan = plan;
  op.args = ReduceAddNorm{};
  op.args.add_count = static_cast<int32_t>(plan.adds.size());
  op.args.count = plan.total();
  op.args.result = plan.result;
  op.args.columns = columns;
  op.args.bias = bias ? static_cast<const float*>(bias->data) : nullptr;
  return op;
}

}  // namespace

int Program::reduce(int nodes, const Plan& plan, const Weight* bias, int64_t columns) {
  ReduceOp op = reduction(comm, nodes, plan, bias, columns);
  const int y = op.y = make(Dtype::kFloat32, columns, false);
  record({nodes, y}, std::move(op));
  return y;
}

int Program::reduce_add_norm(int nodes, const Plan& plan, const Weight* bias, int residual, const Weight& weight,
                             float eps) {
  const int64_t columns = buffer(residual).columns;
  ReduceOp op = reduction(comm, nodes, plan, bias, columns);
  op.residual = residual, op.args.weight = static_cast<const float*>(weight.data), op.args.eps = eps;
  const int y = op.y = make_open(columns);
  use(residual, false);
  Buffer& sum = buffer(residual);
  sum.widest = std::max<int64_t>(sum.widest, *std::max_element(plan.counts.begin(), plan.counts.end()));
  auto* source = operators_.empty() ? nullptr : dynamic_cast<LinearOp*>(operators_.back().get());
  if (source && source->y == nodes) op.source = source, use(source->x);
  record({nodes, y}, std::move(op));
  if (auto& taker = static_cast<ReduceOp&>(*operators_.back()); taker.source) source->taker = &taker;
  return y;
}

int Program::norm_add_norm(int x, const Weight& inner, int residual, const Weight& weight, float eps) {
  const int y = make_open(wide(x, "norm_add_norm").columns);
  NormAddNormOp op;
  op.x = x, op.residual = residual, op.y = y, op.eps = eps;
  op.inner = static_cast<const float*>(inner.data), op.weight = static_cast<const float*>(weight.data);
  record({x, residual, y}, std::move(op));
  return y;
}

int Program::activation(int x, Activation kind) {
  const int64_t columns = wide(x, "activation").columns;
  ActivateOp op;
  op.x = x, op.kind = kind;
  const int y = op.y = make(Dtype::kFloat32, columns, false);
  record({x, y}, std::move(op));
  return y;
}

int Program::gated(int gate_up, Activation kind) {
  GatedOp op;
  op.x = gate_up, op.kind = kind;
  const int y = op.y = make_open(wide(gate_up, "gated_activation").columns / 2);
  record({gate_up, y}, std::move(op));
  return y;
}

int Program::attention(int qkv, const Attention& attention, const std::vector<int32_t>& kv_map) {
  kv_maps_.push_back(std::make_unique<std::vector<int32_t>>(kv_map));
  AttentionOp op;
  op.qkv = qkv, op.attention = attention;
  op.attention.kv_map = kv_maps_.back()->data();
  for (int32_t head = 0; head < attention.query_heads; ++head) {
    const int32_t kv = kv_map[static_cast<size_t>(head)];
    const bool same = head && kv == op.groups.back().kv_begin;
    if (same) op.groups.back().query_end = head + 1;
    else op.groups.push_back({head, head + 1, kv, kv + 1});
  }
  op.ascending = std::is_sorted(kv_map.begin(), kv_map.end());
  op.scratch.assign(static_cast<size_t>(pool.threads()), std::vector<float>(static_cast<size_t>(k.attend_scratch(attention))));
  const int64_t columns = int64_t{attention.query_heads} * attention.head_dim;
  wide(qkv, "attention");
  op.q = make(attention.dtype, columns, false);
  const int y = op.out = make(attention.dtype, columns, true);
  record({qkv, op.q, y}, std::move(op));
  return y;
}

int Program::columns(int x, int64_t start, int64_t stop) {
  if (settle(x, dtype_) == Dtype::kInt8)
    throw std::invalid_argument("what was rounded to int8 for its first consumer is wanted in another form too");
  ColumnsOp op;
  op.x = x, op.start = start;
  const int y = op.y = make_open(stop - start, buffer(x).logit_rows);
  record({x, y}, std::move(op));
  return y;
}

int Program::gather_columns(int x, const std::vector<int64_t>& parts) {
  int64_t columns = 0;
  for (int64_t part : parts) columns += part;
  wide(x, "gather_columns");
  if (ranks() == 1) return x;
  GatherColumnsOp op;
  op.x = x, op.parts = parts;
  const int y = op.y = make(Dtype::kFloat32, columns, false);
  record({x, y}, std::move(op));
  return y;
}

int Program::select_rows(int x) {
  SelectRowsOp op;
  op.x = x;
  const Buffer from = buffer(x);
  const int y = op.y = make(from.dtype, from.columns, from.padded, true);
  buffer(y).open = from.open, buffer(y).twin = x;
  record({x, y}, std::move(op));
  return y;
}

void Program::logits(int given, const Weight& weight, float softcap) {
  const int x = ready(given, input_of(weight.format));
  LogitsOp op;
  op.x = x, op.softcap = softcap, op.format = weight.format;
  op.leaf = Leaf{0, static_cast<int32_t>(weight.inputs), 0, 1};
  op.linear = Linear{weight.data, nullptr, nullptr, 1, 1, static_cast<int32_t>(weight.inputs), weight.tiles()};
  record({x}, std::move(op));
}

void Program::finish() {
  for (size_t i = 0; i < buffers_.size(); ++i) settle(static_cast<int>(i), dtype_);
  place(buffers_, arena_);
  finished_ = true;
}

int64_t Program::buffer_bytes() const {
  int64_t bytes = 0;
  for (const Buffer& buffer : buffers_) bytes += static_cast<int64_t>(buffer.bytes());
  return bytes;
}

void Program::run(const Step& step) {
  if (!finished_) throw std::logic_error("the program is not finished");
  if (step.token_count > max_tokens_ || step.logit_count > max_logit_rows_)
    throw std::invalid_argument("the step is larger than the program's budget");
  const int64_t start = now_ns();
  const FloatingPointMode mode(k);
  const OnItsCore core(pool.caller_cpu());
  for (const auto& op : operators_) op->run(*this, step);
  times.total += now_ns() - start;
  ++times.steps;
}

}  // namespace serried
