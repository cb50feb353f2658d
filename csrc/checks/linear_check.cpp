// A developer's tool: the linears of one instruction set against a reference, against themselves in every cut, and
// against the limits of the machine. Built by hand, with the set's flags from CMakeLists.txt:
//   g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -DSERRIED_avx2=1
//       -DSERRIED_ISA_NAME='"avx2"' -mavx2 -mfma -mf16c -mbmi -mbmi2 csrc/checks/linear_check.cpp -o linear_check
//   ./linear_check          checks, then speeds
//   ./linear_check check    checks only;  ./linear_check speed: speeds only (of bf16, float32 or pack, if named)
#include "linear_support.hpp"

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
  int64_t floats() const { return tokens * linear.nodes * y_stride; }
  void run(const Linear& what, float* y, int t0, int t1, int o0, int o1) {
    (dtype == Dtype::kBFloat16 ? linear_bf16 : linear_f32)(what, x.as(), x_stride, y, y_stride, t0, t1, o0, o1);
  }
};

[[noreturn]] void fail(const char* what, const Case& c, int token, int node, int output, double got, double want) {
  std::printf("FAILED %s: %s inputs %d outputs %d tokens %d leaves %zu nodes %d bias %d", what,
              c.dtype == Dtype::kBFloat16 ? "bf16" : "float32", c.inputs, c.outputs, c.tokens, c.table.leaves.size(),
              c.table.nodes, c.with_bias);
  std::printf("; at token %d node %d output %d: %.9g, not %.9g\n", token, node, output, got, want);
  std::exit(1);
}

void same(const char* what, const Case& c, const float* got, const float* want) {
  for (int64_t i = 0; i < c.floats(); ++i) {
    if (std::memcmp(got + i, want + i, 4) == 0) continue;
    const int64_t row = i / c.y_stride;
    fail(what, c, static_cast<int>(row / c.linear.nodes), static_cast<int>(row % c.linear.nodes),
         static_cast<int>(i % c.y_stride), got[i], want[i]);
  }
}

constexpr float kUntouched = -12345.0f;

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

void check_cuts(Case& c, const float* y) {
  std::vector<float> other(c.floats(), kUntouched);
  for (int t = 0; t < c.tokens; ++t) c.run(c.linear, other.data(), t, t + 1, 0, c.tiles);
  same("tokens alone", c, other.data(), y);
  for (int round = 0; round < 3; ++round) {
    std::fill(other.begin(), other.end(), kUntouched);
    for (int t = 0; t < c.tokens;) {
      const int tokens = std::min(pick(1, 70), c.tokens - t);
      for (int o = 0; o < c.tiles;) {
        const int tiles = std::min(pick(1, 3), c.tiles - o);
        c.run(c.linear, other.data(), t, t + tokens, o, o + tiles);
        o += tiles;
      }
      t += tokens;
    }
    same("ranges", c, other.data(), y);
  }
}

void check_case(Case&& c) {
  std::vector<float> y(c.floats(), kUntouched);
  c.run(c.linear, y.data(), 0, c.tokens, 0, c.tiles);
  for (int64_t i = 0; i < c.floats(); ++i) {
    const bool beyond = i % c.y_stride >= c.tiles * 64;
    if (beyond && y[i] != kUntouched) fail("written beyond the tiles", c, 0, 0, static_cast<int>(i), y[i], kUntouched);
  }
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

// ---- Speeds ----

void decode_speed(Dtype dtype, int outputs, int inputs, const Table& table) {
  // Copies of the weight that no cache holds together (though a server's last-level cache may).
  const size_t element = dtype == Dtype::kBFloat16 ? 2 : 4, bytes = element * outputs * inputs;
  const int copies = static_cast<int>(std::max<size_t>(1, (size_t{256} << 20) / bytes));
  Buffer weights(bytes * copies), x(element * inputs * 64), y(sizeof(float) * outputs * 64);
  std::printf("decode %s [%d x %d], %zu leaves:", element == 2 ? "bf16" : "float32", outputs, inputs,
              table.leaves.size());
  for (const int tokens : {1, 2, 4, 8, 16, 32, 64}) {
    std::vector<double> ratios, speeds, limits;
    for (int round = 0; round < 7; ++round) {
      const double read = seconds([&] { sink = read_bytes(weights.as(), bytes * copies); });
      const double time = seconds([&] {
        for (int i = 0; i < copies; ++i) {
          const Linear linear{weights.as() + bytes * i, nullptr, table.leaves.data(),
                              static_cast<int32_t>(table.leaves.size()), 1, inputs, outputs / 64};
          (element == 2 ? linear_bf16 : linear_f32)(linear, x.as(), inputs, y.as<float>(), outputs, 0, tokens, 0,
                                                    outputs / 64);
        }
      });
      ratios.push_back(read / time);
      speeds.push_back(bytes * copies / time / 1e9);
      limits.push_back(bytes * copies / read / 1e9);
    }
    for (auto* list : {&ratios, &speeds, &limits}) std::sort(list->begin(), list->end());
    std::printf("  %d: %.1f of %.1f GB/s, median ratio %.2f", tokens, speeds.back(), limits.back(), ratios[3]);
  }
  std::printf("\n");
}

void prefill_speed(Dtype dtype, int outputs, int inputs, const Table& table) {
  const size_t element = dtype == Dtype::kBFloat16 ? 2 : 4;
  Buffer weight(element * outputs * inputs), x(element * inputs * 512), y(sizeof(float) * outputs * 512);
  const Linear linear{weight.as(), nullptr, table.leaves.data(), static_cast<int32_t>(table.leaves.size()), 1, inputs,
                      outputs / 64};
  std::printf("prefill %s [%d x %d], %zu leaves:", element == 2 ? "bf16" : "float32", outputs, inputs,
              table.leaves.size());
  for (const int tokens : {32, 128, 512}) {
    std::vector<double> ratios, speeds;
    for (int round = 0; round < 9; ++round) {
      double operations = 0;
      const double limit_time = best(3, [&] { operations = multiply(dtype, 30000); });
      const double time = best(3, [&] {
        (element == 2 ? linear_bf16 : linear_f32)(linear, x.as(), inputs, y.as<float>(), outputs, 0, tokens, 0,
                                                  outputs / 64);
      });
      speeds.push_back(2.0 * tokens * outputs * inputs / time / 1e9);
      ratios.push_back(speeds.back() / (operations / limit_time / 1e9));
    }
    std::sort(ratios.begin(), ratios.end());
    std::sort(speeds.begin(), speeds.end());
    std::printf("  %d: %.0f GFLOP/s, median ratio %.2f", tokens, speeds.back(), ratios[4]);
  }
  std::printf("\n");
}

void pack_speed() {
  const int rows = 4096, columns = 2048;
  Buffer tiles(size_t{4} * rows * columns), source(size_t{4} * rows * columns);
  for (const Format weight : {Format::kBFloat16, Format::kFloat32}) {
    for (const Dtype from : {Dtype::kBFloat16, Dtype::kFloat32}) {
      const double time =
          best(3, [&] { pack(tiles.as(), weight, columns, 0, rows, source.as(), from, columns, columns); });
      std::printf("pack %s from %s: %.1f GB/s of source\n", weight == Format::kBFloat16 ? "bf16" : "float32",
                  from == Dtype::kBFloat16 ? "bf16" : "float32",
                  (from == Dtype::kBFloat16 ? 2.0 : 4.0) * rows * columns / time / 1e9);
    }
  }
}

void speeds(const std::string& only) {
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat32}) {
    if (!only.empty() && only != (dtype == Dtype::kBFloat16 ? "bf16" : "float32")) continue;
    double operations = 0;
    const double time = best(20, [&] { operations = multiply(dtype, 30000); });
    std::printf("multiply %s: %.0f GFLOP/s\n", dtype == Dtype::kBFloat16 ? "bf16" : "float32", operations / time / 1e9);
    prefill_speed(dtype, 4096, 1024, one_leaf(1024));
    prefill_speed(dtype, 1024, 2048, one_leaf(2048));
    prefill_speed(dtype, 1024, 2048, tree_of(16, 128));
    prefill_speed(dtype, 1024, 3072, one_leaf(3072));
    prefill_speed(dtype, 1024, 3072, tree_of(24, 128));
    prefill_speed(dtype, 512, 25600, tree_of(200, 128));
    decode_speed(dtype, 4096, 1024, one_leaf(1024));
    decode_speed(dtype, 1024, 2048, tree_of(16, 128));
    decode_speed(dtype, 6144, 1024, one_leaf(1024));
    decode_speed(dtype, 1024, 3072, tree_of(24, 128));
    decode_speed(dtype, 151936, 1024, one_leaf(1024));
  }
  if (only.empty() || only == "pack") pack_speed();
}

}  // namespace
}  // namespace serried

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what != "speed") {  // with denormals
    serried::check_rounding();
    serried::check_pack();
  }
  serried::begin_thread();
  if (what != "speed") serried::check_all();
  if (what != "check") serried::speeds(what == "speed" && argc > 2 ? argv[2] : "");
}
