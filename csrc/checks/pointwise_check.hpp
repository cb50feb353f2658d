// Checks and speeds of pointwise.hpp.
#pragma once
#include "../kernels/pointwise.hpp"
#include "../kernels/survey.hpp"
#include "check_support.hpp"

namespace serried {
namespace {

const std::vector<int> kColumns = {1, 2, 3, 15, 16, 17, 31, 64, 65, 100, 576, 1023};

bool same(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }
bool same(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }
// bf16 adds its own rounding.
bool close(double got, double want, Dtype dtype, double relative, double absolute = 1e-7) {
  if (dtype == Dtype::kBFloat16) relative += 0.00391;
  return std::abs(got - want) <= relative * std::abs(want) + absolute;
}

void check_exp() {
  double worst = 0;
  for (double x = -87.3; x < 88.7; x += 0.00037) {
    const double want = std::exp(double(float(x)));
    const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
    worst = std::max(worst, std::abs(simd::exp_one(float(x)) - want) / ulp);
  }
  std::printf("exp: %.2f ulp at worst\n", worst);
  expect(worst < 2, "exp within 2 ulp");
  expect(simd::exp_one(-INFINITY) == 0 && simd::exp_one(-88) == 0 && simd::exp_one(-1e30f) == 0, "exp underflow");
  expect(simd::exp_one(INFINITY) == INFINITY && simd::exp_one(89) == INFINITY, "exp overflow");
  expect(simd::exp_one(0) == 1 && std::isnan(simd::exp_one(NAN)), "exp of 0 and NaN");
}

void check_rounding() {
  std::mt19937 random(3);
  std::vector<float> x(4099);
  for (float& value : x) {
    const uint32_t u = random() % 8 == 0 ? (random() & 0xffff8000u) : uint32_t(random());
    std::memcpy(&value, &u, 4);
  }
  x[0] = NAN, x[1] = INFINITY, x[2] = -INFINITY, x[3] = 3.4e38f, x[4] = -0.0f;
  std::vector<uint16_t> y(5000, 9);
  round_rows(x.data(), Dtype::kFloat32, 4099, y.data(), Dtype::kBFloat16, 4099, 5000, 1);
  for (size_t i = 0; i < x.size(); ++i) expect(y[i] == narrow(x[i]), "round to bf16");
  for (size_t i = x.size(); i < 5000; ++i) expect(y[i] == 0, "round: zero padding");
}

double activation(Activation a, double x) {
  if (a == Activation::kSilu) return x / (1 + std::exp(-x));
  if (a == Activation::kGelu) return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

void check_activations() {
  std::mt19937 random(5);
  for (Activation a : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh}) {
    for (int n : kColumns) {
      const auto gate = normals(random, 3 * n + 9, 4), up = normals(random, 3 * n + 9);
      std::vector<float> active(gate.begin(), gate.begin() + n);
      activate(a, active.data(), n);
      for (int i = 0; i < n; ++i) expect(close(active[i], activation(a, gate[i]), Dtype::kFloat32, 2e-6), "activate");
      for (Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
        Buffer out(dtype, 3 * (n + 5), 7);
        gated(a, gate.data(), up.data(), n + 3, out.data(), dtype, n, n + 5, 3);
        for (int r = 0; r < 3; ++r)
          for (int i = 0; i < n + 5; ++i) {
            const double want = i < n ? activation(a, gate[r * (n + 3) + i]) * up[r * (n + 3) + i] : 0;
            expect(close(out[r * (n + 5) + i], want, dtype, 2e-6), "gated");
          }
      }
      // The same element has the same bits at every place.
      for (int i = 0; i < n; ++i) {
        float one = gate[i];
        activate(a, &one, 1);
        expect(same(one, active[i]), "activate: place");
      }
    }
    float special[4] = {0, 60, -60, NAN};
    activate(a, special, 4);
    expect(special[0] == 0 && special[1] == 60 && std::abs(special[2]) < 1e-20 && std::isnan(special[3]), "special");
  }
}

void check_norms() {
  std::mt19937 random(6);
  for (int n : kColumns)
    for (Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      const int rows = 3, stride = n + 2, out_stride = n + 7;
      const auto x = normals(random, rows * stride, 3), weight = normals(random, n);
      Buffer out(dtype, rows * out_stride, 7), one(dtype, out_stride, 7);
      norm(x.data(), stride, weight.data(), 1e-5f, n, out.data(), dtype, out_stride, rows);
      for (int r = 0; r < rows; ++r) {
        double square = 0;
        for (int i = 0; i < n; ++i) square += double(x[r * stride + i]) * x[r * stride + i];
        for (int i = 0; i < out_stride; ++i) {
          const double want = i < n ? x[r * stride + i] / std::sqrt(square / n + 1e-5) * weight[i] : 0;
          expect(close(out[r * out_stride + i], want, dtype, 1e-6), "norm");
        }
      }
      norm(x.data() + stride, stride, weight.data(), 1e-5f, n, one.data(), dtype, out_stride, 1);
      for (int i = 0; i < out_stride; ++i) expect(same(one[i], out[out_stride + i]), "norm: a row alone");
    }
}

void check_folds() {
  std::mt19937 random(7);
  for (int n : kColumns)
    for (int count : {1, 2, 5, 128}) {
      const int rows = 2, stride = n + 1;
      const auto data = normals(random, size_t(count) * rows * stride), bias = normals(random, n);
      const auto weight = normals(random, n), before = normals(random, rows * stride);
      std::vector<const float*> slots;
      for (int s = 0; s < count; ++s) slots.push_back(data.data() + size_t(s) * rows * stride);
      std::vector<Add> adds;
      std::vector<int> left(count);
      std::iota(left.begin(), left.end(), 0);
      while (left.size() > 1) {
        const size_t i = random() % (left.size() - 1);
        adds.push_back({left[i], left[i + 1]});
        left.erase(left.begin() + i + 1);
      }
      const bool biased = random() % 2;
      const ReduceAddNorm op{
          adds.data(), int(adds.size()), count, left[0], n, biased ? bias.data() : nullptr, weight.data(), 1e-5f};
      auto residual = before;
      std::vector<float> folded(rows * stride), normed(rows * stride), again(rows * stride);
      fold(op, slots.data(), stride, folded.data(), stride, rows);
      reduce_add_norm(op, slots.data(), stride, residual.data(), stride, normed.data(), Dtype::kFloat32, stride, rows);
      norm(residual.data(), stride, weight.data(), 1e-5f, n, again.data(), Dtype::kFloat32, stride, rows);
      expect(normed == again, "reduce_add_norm: the norm of the residual");
      for (int r = 0; r < rows; ++r)
        for (int i = 0; i < n; ++i) {
          std::vector<float> value(count);
          for (int s = 0; s < count; ++s) value[s] = slots[s][r * stride + i];
          for (const Add& add : adds) value[add.to] += value[add.from];
          const float y = biased ? value[op.result] + bias[i] : value[op.result];
          expect(same(folded[r * stride + i], y), "fold: exactly the order of the adds");
          expect(same(residual[r * stride + i], before[r * stride + i] + y), "residual");
        }
    }
}

// Against a sort of all, and sums by the library's exp. x: with NaN and many equals.
void check_survey(const std::vector<float>& x) {
  const auto n = static_cast<int64_t>(x.size()), leaves = (n + 63) / 64;
  std::vector<int64_t> order;
  for (int64_t i = 0; i < n; ++i)
    if (x[i] > -INFINITY) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x[a] > x[b]; });
  for (int64_t count : {int64_t{1}, int64_t{7}, n / 2 + 1, n}) {
    std::vector<int64_t> places(static_cast<size_t>(count) + 1, -5);
    std::vector<double> tops(static_cast<size_t>(leaves)), sums(static_cast<size_t>(leaves) + 1, -5);
    SurveyRow row{0, 0, places.data(), tops.data(), sums.data()};
    survey(x.data(), n, count, 0.7, &row);
    expect(row.possible == static_cast<int64_t>(order.size()), "survey: possible");
    expect(row.found == std::min<int64_t>(count, row.possible), "survey: found");
    expect(std::equal(places.begin(), places.begin() + row.found, order.begin()), "survey: places");
    expect(places.back() == -5 && sums.back() == -5, "survey: no more");
    for (int64_t leaf = 0; leaf < leaves; ++leaf) {
      const int64_t end = std::min(n, leaf * 64 + 64);
      double top = -INFINITY, total = 0;
      for (int64_t i = leaf * 64; i < end; ++i)
        if (x[i] > top) top = x[i];
      for (int64_t i = leaf * 64; i < end; ++i)
        if (x[i] > -INFINITY) total += std::exp((x[i] - top) / 0.7);
      expect(tops[leaf] == top / 0.7, "survey: leaf_max");
      expect(std::abs(sums[leaf] - total) <= 1e-15 * 64 * total, "survey: leaf_sum");
      std::vector<double> alone(2);
      SurveyRow one{0, 0, nullptr, &alone[0], &alone[1]};
      survey(x.data() + leaf * 64, end - leaf * 64, 0, 0.7, &one);
      expect(same(alone[0], tops[leaf]) && same(alone[1], sums[leaf]), "survey: a leaf alone");
    }
  }
}

void check_sampling() {
  std::mt19937 random(8);
  for (int n : {1, 2, 15, 16, 17, 63, 64, 65, 200, 1000, 151665}) {
    auto x = normals(random, n, 3);
    for (float& value : x) value = std::round(value * 4) / 4;  // many equals
    if (n > 4) x[n / 2] = NAN, x[0] = NAN;
    int64_t want = 0, index;
    float top = -INFINITY, value;
    for (int i = 0; i < n; ++i)
      if (x[i] > top) top = x[i], want = i;
    argmax(x.data(), n, &index, &value);
    expect(index == want && value == top, "argmax");
    check_survey(x);
  }
  const std::vector<float> none(37, -INFINITY), nans(37, NAN);
  int64_t index;
  float value;
  argmax(none.data(), 37, &index, &value);
  expect(index == 0 && value == -INFINITY, "argmax of -inf");
  argmax(nans.data(), 37, &index, &value);
  expect(index == 0 && value == -INFINITY, "argmax of NaN");
}

void check_pointwise() {
  check_exp();
  check_rounding();
  check_activations();
  check_norms();
  check_folds();
  check_sampling();
}

// GB/s of what is read and written, for rows that stay in the second cache.
void bench_pointwise() {
  constexpr int kRows = 32, kWide = 2048;
  std::mt19937 random(1);
  const auto x = normals(random, kRows * kWide), y = normals(random, kRows * kWide), weight = normals(random, kWide);
  auto residual = x;
  Buffer out(Dtype::kBFloat16, kRows * kWide, 0);
  const auto report = [](const char* name, double bytes, auto f) {
    const auto runs = [&] {
      for (int i = 0; i < 20; ++i) f();
    };
    const double time = best(runs, 20) / 20;
    std::printf("%-30s %6.1f GB/s\n", name, 1e-9 * bytes / time);
  };
  const double n = kRows * kWide;
  report("norm to bf16", n * 6,
         [&] { norm(x.data(), kWide, weight.data(), 1e-6f, kWide, out.data(), Dtype::kBFloat16, kWide, kRows); });
  for (auto [name, a] : {std::pair{"silu gated to bf16", Activation::kSilu},
                         {"gelu gated to bf16", Activation::kGelu},
                         {"gelu_tanh gated to bf16", Activation::kGeluTanh}})
    report(name, n * 10,
           [&] { gated(a, x.data(), y.data(), kWide, out.data(), Dtype::kBFloat16, kWide, kWide, kRows); });
  const Add add{0, 1};
  const float* slots[] = {x.data(), y.data()};
  const ReduceAddNorm one{nullptr, 0, 1, 0, kWide, nullptr, weight.data(), 1e-6f};
  const ReduceAddNorm two{&add, 1, 2, 0, kWide, nullptr, weight.data(), 1e-6f};
  for (const auto& [name, op] : {std::pair{"reduce_add_norm, 1 node", one}, {"reduce_add_norm, 2 nodes", two}})
    report(name, n * (4 * op.count + 8 + 2), [&, &o = op] {
      reduce_add_norm(o, slots, kWide, residual.data(), kWide, out.data(), Dtype::kBFloat16, kWide, kRows);
    });
  int64_t index;
  float value;
  report("argmax", n * 4, [&] {
    argmax(x.data(), kRows * kWide, &index, &value);
    sink = value;
  });
  const int64_t all = kRows * kWide;
  std::vector<int64_t> places(64);
  std::vector<double> tops(all / 64), sums(all / 64);
  SurveyRow row{0, 0, places.data(), tops.data(), nullptr};
  report("survey, 20 places", n * 4, [&] { survey(x.data(), all, 20, 0.6, &row); });
  row.leaf_sum = sums.data();
  report("survey with sums", n * 4, [&] { survey(x.data(), all, 64, 0.6, &row); });
}

}  // namespace
}  // namespace serried
