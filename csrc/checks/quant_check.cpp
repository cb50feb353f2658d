// A developer's tool: the quantized linears of one instruction set against a reference, and against themselves in every
// cut. `make checks` builds and runs it for every set.
#include "../kernels/pointwise.hpp"
#include "isa.hpp"
#include "linear_cuts.hpp"

namespace serried {
namespace {

void run_linear(Format format, const Linear& linear, const void* x, int64_t x_stride, float* y, int64_t y_stride,
                int t0, int t1, int o0, int o1) {
  if (format == Format::kInt8) return linear_quantized<Format::kInt8>(linear, x, x_stride, y, y_stride, t0, t1, o0, o1);
  if (format == Format::kInt4) return linear_quantized<Format::kInt4>(linear, x, x_stride, y, y_stride, t0, t1, o0, o1);
  linear_quantized<Format::kInt4Min>(linear, x, x_stride, y, y_stride, t0, t1, o0, o1);
}

struct Case {
  Format format;
  int inputs, columns, outputs, tokens;
  Table table;
  bool with_bias;
  int64_t x_stride, x_bytes, y_stride;
  int tiles;
  Buffer weight, x;
  std::vector<float> bias, w_values;
  Linear linear;

  // extra: columns of x behind the inputs, in units of 32; missing: columns that the last group lacks.
  Case(Format format, int inputs, int missing, int outputs, int tokens, Table t, bool with_bias, int extra)
      : format(format), inputs(inputs), columns(inputs - missing), outputs(outputs), tokens(tokens),
        table(std::move(t)), with_bias(with_bias), x_stride((inputs + extra * 32 + 63) / 64 * 64),
        x_bytes(row_bytes(Dtype::kInt8, x_stride)), y_stride((outputs + 63) / 64 * 64 + 16), tiles((outputs + 63) / 64),
        weight(input_bytes(format) * tiles * inputs), x(x_bytes * tokens) {
    std::vector<float> values(static_cast<size_t>(outputs) * columns);
    for (float& value : values) value = normal() * 0.05f;
    const int64_t groups = inputs / kGroup, bytes = groups * blocks::shape_of(format).bytes;
    std::vector<uint8_t> packed(outputs * bytes);
    quantize(format, values.data(), Dtype::kFloat32, outputs, columns, columns, packed.data(), bytes);
    for (int r = 0; r < outputs;) {
      const int rows = std::min(pick(1, 90), outputs - r);
      pack_blocks(weight.as(), format, inputs, r, rows, packed.data() + r * bytes, groups, bytes);
      r += rows;
    }
    w_values.resize(static_cast<size_t>(outputs) * inputs);
    for (int r = 0; r < outputs; ++r) unpack_row(weight.as(), format, inputs, r, &w_values[static_cast<size_t>(r) * inputs], inputs);
    for (int t = 0; t < tokens; ++t) {
      std::vector<float> row(columns);
      for (float& value : row) value = normal();
      for (int k = pick(0, 99); k < columns && t % 3; k += pick(1, 200)) row[k] *= 16;
      if (t % 5 == 4) std::fill(row.begin(), row.begin() + std::min(64, columns), 0.0f);
      round_rows(row.data(), Dtype::kFloat32, columns, x.as() + t * x_bytes, Dtype::kInt8, columns, x_stride, 1);
    }
    if (with_bias) {
      bias.assign(tiles * 64, 0.0f);
      for (int i = 0; i < outputs; ++i) bias[i] = normal();
    }
    linear = {weight.as(), with_bias ? bias.data() : nullptr, table.leaves.data(),
              static_cast<int32_t>(table.leaves.size()), table.nodes, inputs, tiles};
  }
  Int8Row<char> row(int t) { return {x.as() + t * x_bytes, x_stride}; }
  const char* name() const {
    return format == Format::kInt8 ? "int8" : format == Format::kInt4 ? "int4" : "int4 with minimum";
  }
  int64_t floats() const { return tokens * linear.nodes * y_stride; }
  void run(const Linear& what, float* y, int t0, int t1, int o0, int o1) {
    run_linear(format, what, x.as(), x_stride, y, y_stride, t0, t1, o0, o1);
  }
};

float multiply_add(float a, float b, float c) {
#if SERRIED_baseline
  return c + a * b;
#else
  return std::fma(a, b, c);
#endif
}

// The values of one output and group in the tiles: integers without their offset, scale, minimum.
struct Group {
  int values[32];
  float scale, minimum;

  Group(Case& c, int output, int group) {
    const auto shape = blocks::shape_of(c.format);
    const int o = output % 64;
    const uint8_t* tile = c.weight.as<uint8_t>() + (int64_t{output / 64} * (c.inputs / 32) + group) * shape.bytes * 64;
    for (int k = 0; k < 32; ++k) {
      const int f = c.format == Format::kInt8 ? k / 4 : k % 16 / 4;
      const int byte = tile[f * 256 + o * 4 + k % 4];
      values[k] = c.format == Format::kInt8 ? byte - 128 : (k < 16 ? byte & 15 : byte >> 4);
      if (c.format == Format::kInt4) values[k] -= 8;
    }
    scale = blocks::get_half(tile + shape.units * 256 + o * 2);
    minimum = shape.scales == 4 ? blocks::get_half(tile + shape.units * 256 + 128 + o * 2) : 0.0f;
  }
};

// The chain of a leaf in scalars, in the order that quant_group.hpp states, and the same in double precision from
// the unpacked weights.
struct LeafSum {
  float sum = 0;
  double exact = 0, magnitude = 0;

  LeafSum(Case& c, int token, int output, const Leaf& leaf) {
    const auto row = c.row(token);
    for (int g = leaf.start / 32; g < (leaf.stop + 31) / 32; ++g) {
      const Group w(c, output, g);
      int integer = 0;
      for (int k = 0; k < 32; ++k) {
        const int q = row.fine[g] ? kFineSteps * row.high[g * 32 + k] + row.low[g * 32 + k] : row.high[g * 32 + k];
        integer += q * w.values[k];
        const double product = double{row.scales[g]} * q * c.w_values[static_cast<size_t>(output) * c.inputs + g * 32 + k];
        exact += product;
        magnitude += std::abs(product);
      }
      sum = multiply_add(static_cast<float>(integer) * w.scale, row.scales[g], sum);
      if (c.format == Format::kInt4Min)
        sum = multiply_add(w.minimum, row.scales[g] * static_cast<float>(row.sums[g]), sum);
    }
  }
};

void check_reference(Case& c, const float* y) {
  for (int t = 0; t < c.tokens; ++t) {
    for (int o = 0; o < c.outputs; o += t < 3 ? 1 : 7) {
      std::vector<float> stack;
      double exact = 0, magnitude = 0;
      int n = 0;
      for (const Leaf& leaf : c.table.leaves) {
        const LeafSum sum(c, t, o, leaf);
        stack.push_back(sum.sum);
        exact += sum.exact;
        magnitude += sum.magnitude;
        for (int p = 0; p < leaf.pops; ++p) {
          const float right = stack.back();
          stack.pop_back();
          stack.back() += right;
        }
        if (!leaf.ends_node) continue;
        const float want = c.with_bias ? stack[0] + c.bias[o] : stack[0];
        const float got = y[(static_cast<int64_t>(t) * c.table.nodes + n) * c.y_stride + o];
        if (std::memcmp(&got, &want, 4) != 0) fail("against scalars", c, t, n, o, got, want);
        if (c.with_bias) exact += c.bias[o];
        // int4 with minimum: unpacking rounds every value once, the kernel only the sum.
        if (!(std::abs(got - exact) <= magnitude * 2e-6 + 1e-6)) fail("against double", c, t, n, o, got, exact);
        stack.clear();
        exact = magnitude = 0;
        ++n;
      }
    }
  }
}

void check_case(Case&& c) {
  const auto y = whole(c);
  check_reference(c, y.data());
  check_cuts(c, y.data());
}

void check_all() {
  for (const Format format : {Format::kInt8, Format::kInt4, Format::kInt4Min}) {
    for (int tokens = 1; tokens <= 70; ++tokens) {
      const int inputs = 32 * pick(1, 12);
      check_case({format, inputs, pick(0, 31), pick(1, 200), tokens, one_leaf(inputs), tokens % 2 == 1, pick(0, 2)});
    }
    for (const int units : {1, 2, 5, 24, 64, 65, 80}) {
      for (const int unit : {32, 64, 96, 128}) {
        const int cut = pick(0, 2);
        check_case({format, units * unit, 0, pick(1, 130), pick(1, 70), tree_of(units, unit, cut), cut == 0, 1});
      }
    }
    check_case({format, 5 * 800, 0, 64, 150, tree_of(5, 800), true, 0});
    check_case({format, 5 * 4128, 7, 64, 70, one_leaf(5 * 4128), true, 0});
    check_case({format, 9600, 0, 70, 133, one_leaf(9600), false, 0});
  }
  std::printf("%s: all checks passed\n", SERRIED_ISA_NAME);
}

}  // namespace
}  // namespace serried

int main() {
  if (!serried::runs_here()) return serried::kSkipped;
  serried::begin_thread();
  serried::check_all();
}
