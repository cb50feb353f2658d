// A developer's tool: the linears of one instruction set against a reference, against themselves in every cut, and
// against the limits of the machine. `make checks` builds and runs it for every set; by hand:
//   linear_check_avx2          checks, then speeds
//   linear_check_avx2 check    checks only;  speed: speeds only (of bf16, float32 or pack, if named)
#include "isa.hpp"
#include "linear_cuts.hpp"
#include "linear_speed.hpp"

namespace serried {
namespace {

struct Case {
  Dtype dtype;
  int inputs, outputs, tokens;
  Table table;
  bool with_bias;
  int64_t x_stride, y_stride;
  int tiles;
  size_t element;
  Buffer weight, x;
  std::vector<float> bias, x_values, w_values;
  std::vector<uint16_t> packed_from;
  Linear linear;

  Case(Dtype dtype, int inputs, int outputs, int tokens, Table t, bool with_bias, int extra = 32)
      : dtype(dtype), inputs(inputs), outputs(outputs), tokens(tokens), table(std::move(t)), with_bias(with_bias),
        x_stride(inputs + extra), y_stride((outputs + 63) / 64 * 64 + 16), tiles((outputs + 63) / 64),
        element(dtype == Dtype::kBFloat16 ? 2 : 4), weight(element * tiles * 64 * inputs),
        x(element * x_stride * tokens) {
    w_values.resize(static_cast<size_t>(outputs) * inputs);
    for (float& value : w_values) value = normal() * 0.05f;
    pack(weight.as(), format_of(dtype), inputs, 0, outputs, w_values.data(), Dtype::kFloat32, inputs, inputs);
    x_values.resize(static_cast<size_t>(tokens) * inputs);
    for (float& value : x_values) value = normal();
    if (dtype == Dtype::kBFloat16) {
      for (float& value : w_values) value = rounded(value);
      for (float& value : x_values) value = rounded(value);
    }
    for (int t = 0; t < tokens; ++t) {
      for (int k = 0; k < inputs; ++k) put(t * x_stride + k, x_values[static_cast<size_t>(t) * inputs + k]);
    }
    if (with_bias) {
      bias.assign(tiles * 64, 0.0f);
      for (int i = 0; i < outputs; ++i) bias[i] = normal();
    }
    linear = {weight.as(), with_bias ? bias.data() : nullptr, table.leaves.data(),
              static_cast<int32_t>(table.leaves.size()), table.nodes, inputs, tiles};
  }
  static Format format_of(Dtype dtype) { return dtype == Dtype::kBFloat16 ? Format::kBFloat16 : Format::kFloat32; }
  static float rounded(float value) { return linear_detail::bf16_value(linear_detail::bf16_bits(value)); }
  void put(int64_t at, float value) {
    if (dtype == Dtype::kBFloat16) {
      x.as<uint16_t>()[at] = linear_detail::bf16_bits(value);
    } else {
      x.as<float>()[at] = value;
    }
  }
  const char* name() const { return dtype == Dtype::kBFloat16 ? "bf16" : "float32"; }
  int64_t floats() const { return tokens * linear.nodes * y_stride; }
  void run(const Linear& what, float* y, int t0, int t1, int o0, int o1) {
    (dtype == Dtype::kBFloat16 ? linear_bf16 : linear_f32)(what, x.as(), x_stride, y, y_stride, t0, t1, o0, o1);
  }
};

// One element in double precision, with the sum of magnitudes for the bound on the error.
double exact_sum(const float* x, const float* w, int begin, int end, double* magnitude) {
  double sum = 0;
  for (int k = begin; k < end; ++k) {
    sum += double{x[k]} * w[k];
    *magnitude += std::abs(double{x[k]} * w[k]);
  }
  return sum;
}

void check_reference(Case& c, const float* y) {
  for (int t = 0; t < c.tokens; ++t) {
    for (int o = 0; o < c.outputs; ++o) {
      size_t leaf = 0;
      for (int n = 0; n < c.table.nodes; ++n) {
        double want = c.with_bias ? c.bias[o] : 0, magnitude = std::abs(want);
        do {
          want += exact_sum(&c.x_values[static_cast<size_t>(t) * c.inputs],
                            &c.w_values[static_cast<size_t>(o) * c.inputs], c.table.leaves[leaf].start,
                            c.table.leaves[leaf].stop, &magnitude);
        } while (!c.table.leaves[leaf++].ends_node);
        const float got = y[(static_cast<int64_t>(t) * c.table.nodes + n) * c.y_stride + o];
        // Each of the additions of a chain may err by half a unit of what is at most the sum of magnitudes; in
        // practice errors are far smaller.
        if (!(std::abs(got - want) <= magnitude * 1e-6 + 1e-6)) fail("against double", c, t, n, o, got, want);
      }
    }
  }
}

// The same chain in scalars, for the sets whose multiply-add is a plain one.
void check_scalar(Case& c, const float* y) {
#if SERRIED_avx512_bf16
  if (c.dtype == Dtype::kBFloat16) return;
#elif SERRIED_amx
  if (c.dtype == Dtype::kBFloat16) return;
#endif
  for (int t = 0; t < c.tokens; ++t) {
    for (int o = 0; o < c.outputs; ++o) {
      std::vector<float> stack;
      int n = 0;
      for (const Leaf& leaf : c.table.leaves) {
        float sum = 0;
        for (int k = leaf.start; k < leaf.stop; ++k) {
          const float w = c.w_values[static_cast<size_t>(o) * c.inputs + k];
          const float v = c.x_values[static_cast<size_t>(t) * c.inputs + k];
#if SERRIED_baseline
          sum += w * v;
#else
          sum = std::fma(w, v, sum);
#endif
        }
        stack.push_back(sum);
        for (int p = 0; p < leaf.pops; ++p) {
          const float right = stack.back();
          stack.pop_back();
          stack.back() += right;
        }
        if (!leaf.ends_node) continue;
        if (stack.size() != 1) fail("leaf table", c, t, n, o, static_cast<double>(stack.size()), 1);
        const float want = c.with_bias ? stack[0] + c.bias[o] : stack[0];
        const float got = y[(static_cast<int64_t>(t) * c.table.nodes + n++) * c.y_stride + o];
        if (std::memcmp(&got, &want, 4) != 0) fail("against scalars", c, t, n, o, got, want);
        stack.clear();
      }
    }
  }
}

// Each leaf as a linear of its own (one leaf, the same weights), folded here.
void check_leaves(Case& c, const float* y) {
  std::vector<std::vector<float>> stack;
  std::vector<float> want(c.floats(), kUntouched), alone(c.tokens * c.y_stride);
  int n = 0;
  for (const Leaf& leaf : c.table.leaves) {
    const Leaf single{leaf.start, leaf.stop, 0, 1};
    Linear one = c.linear;
    one.leaves = &single;
    one.leaf_count = one.nodes = 1;
    one.bias = nullptr;
    c.run(one, alone.data(), 0, c.tokens, 0, c.tiles);
    stack.push_back(alone);
    for (int p = 0; p < leaf.pops; ++p) {
      const auto right = std::move(stack.back());
      stack.pop_back();
      for (size_t i = 0; i < right.size(); ++i) stack.back()[i] += right[i];
    }
    if (!leaf.ends_node) continue;
    for (int t = 0; t < c.tokens; ++t) {
      for (int o = 0; o < c.tiles * 64; ++o) {
        const float sum = stack[0][t * c.y_stride + o];
        want[(static_cast<int64_t>(t) * c.table.nodes + n) * c.y_stride + o] = c.with_bias ? sum + c.bias[o] : sum;
      }
    }
    ++n;
    stack.clear();
  }
  same("leaves alone, folded by hand", c, y, want.data());
}

void check_case(Case&& c) {
  const auto y = whole(c);
  check_reference(c, y.data());
  check_scalar(c, y.data());
  check_cuts(c, y.data());
  check_leaves(c, y.data());
}

void check_pack() {
  for (const Format weight : {Format::kBFloat16, Format::kFloat32}) {
    for (const Dtype from : {Dtype::kBFloat16, Dtype::kFloat32}) {
      const int columns = 77, rows = 150, inputs = 96, stride = 80;
      std::vector<float> values(rows * stride);
      std::vector<uint16_t> halves(rows * stride);
      for (int i = 0; i < rows * stride; ++i) values[i] = i % 97 == 0 ? NAN : i % 89 == 0 ? INFINITY : normal();
      for (int i = 0; i < rows * stride; ++i) halves[i] = linear_detail::bf16_bits(values[i]);
      Buffer tiles(192 * inputs * 4);
      const bool half = from == Dtype::kBFloat16;
      for (int r = 0; r < rows;) {
        const int n = std::min(pick(1, 90), rows - r);
        const void* source = &values[r * stride];
        if (half) source = &halves[r * stride];
        pack(tiles.as(), weight, inputs, r, n, source, from, columns, stride);
        r += n;
      }
      std::vector<float> out(inputs);
      for (int r = 0; r < 192; ++r) {
        unpack_row(tiles.as(), weight, inputs, r, out.data(), inputs);
        for (int k = 0; k < inputs; ++k) {
          float want = r < rows && k < columns ? values[r * stride + k] : 0.0f;
          if (half || weight == Format::kBFloat16) want = Case::rounded(want);
          if (std::memcmp(&out[k], &want, 4) != 0) {
            std::printf("FAILED pack: row %d k %d: %g, not %g\n", r, k, out[k], want);
            std::exit(1);
          }
        }
      }
    }
  }
}

void check_rounding() {
  for (uint64_t i = 0; i < (1u << 20); ++i) {
    const uint32_t bits = static_cast<uint32_t>(random_bits());
    const float value = __builtin_bit_cast(float, bits);
    const uint16_t got = linear_detail::bf16_bits(value);
    const float back = linear_detail::bf16_value(got);
    const double low = linear_detail::bf16_value(static_cast<uint16_t>(bits >> 16));
    const double high = linear_detail::bf16_value(static_cast<uint16_t>((bits >> 16) + 1));
    bool right = std::isnan(value) ? std::isnan(back) : std::isinf(value) ? back == value : true;
    if (std::isfinite(value) && std::isfinite(high)) {
      const double below = std::abs(value - low), above = std::abs(high - value);
      const bool even = (got & 1) == 0 && (back == low || back == high);
      right = below < above ? back == low : above < below ? back == high : even;
    }
    if (!right) {
      std::printf("FAILED rounding of %08x: %04x\n", bits, got);
      std::exit(1);
    }
  }
}

void check_all() {
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat32}) {
    for (const int tokens : {1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 31, 33, 47, 64, 65, 70, 100, 150}) {
      const int inputs = 32 * pick(1, 12);
      check_case({dtype, inputs, pick(1, 200), tokens, one_leaf(inputs), tokens % 2 == 1, 32 * pick(0, 2)});
    }
    for (const int units : {1, 2, 5, 24, 64, 65, 80}) {
      for (const int unit : {32, 64, 96, 128}) {
        const int tokens = pick(1, 70), cut = pick(0, 2);
        check_case({dtype, units * unit, pick(1, 130), tokens, tree_of(units, unit, cut), cut == 0, 32});
      }
    }
    check_case({dtype, 5 * 800, 64, 70, tree_of(5, 800), true});
    check_case({dtype, 5 * 4128, 64, 70, tree_of(5, 4128), true});
    check_case({dtype, 9600, 70, 133, one_leaf(9600), false, 0});
  }
  std::printf("%s: all checks passed\n", SERRIED_ISA_NAME);
}

}  // namespace
}  // namespace serried

int main(int argc, char** argv) {
  if (!serried::runs_here()) return serried::kSkipped;
  const std::string what = argc > 1 ? argv[1] : "";
  if (what != "speed") {  // with denormals
    serried::check_rounding();
    serried::check_pack();
  }
  serried::begin_thread();
  if (what != "speed") serried::check_all();
  if (what != "check") serried::speeds(what == "speed" && argc > 2 ? argv[2] : "");
}
