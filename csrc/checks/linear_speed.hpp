// How fast the linears of one instruction set are, beside reading the weights and a loop of multiplications.
#pragma once
#include "linear_support.hpp"

namespace serried {
namespace {

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
