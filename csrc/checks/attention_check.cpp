// A developer's check and benchmark of pointwise.hpp and attention.hpp. `make checks` builds and runs it for every
// instruction set. Options: `check` or `bench` alone. Exit status 1 if anything does not hold.
#include "../kernels/attention.hpp"
#include "../kernels/pointwise.hpp"
#include "check_support.hpp"
#include "isa.hpp"
#include "pointwise_check.hpp"

namespace serried {
namespace {

// One sequence's cache and inputs, with its own numbering of blocks.
struct Case {
  int query_heads, kv_heads, dim, block_size, window, length;
  std::vector<int32_t> map;
  Dtype dtype;
  float softcap = 0;
};

// The same keys and values for a seed, whatever the block size; every slot that is not written is NaN.
struct Cache {
  Cache(const Case& c, unsigned seed, int reserve = 3) : c(c) {
    std::mt19937 random(seed);
    const int blocks = (c.length + c.block_size - 1) / c.block_size;
    table.resize(blocks + reserve);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(seed + c.block_size));
    const size_t elements = table.size() * c.block_size * c.kv_heads * c.dim;
    k = Buffer(c.dtype, elements, NAN), v = Buffer(c.dtype, elements, NAN);
    table.resize(blocks);
    std::normal_distribution<float> normal;
    for (int p = 0; p < c.length; ++p)
      for (int i = 0; i < c.kv_heads * c.dim; ++i) {
        k.set(at(p) + i, normal(random));
        v.set(at(p) + i, normal(random));
      }
    q = Buffer(c.dtype, size_t(c.length) * c.query_heads * c.dim, 0);
    for (size_t i = 0; i < q.size(); ++i) q.set(i, normal(random));
    positions.resize(c.length);
    std::iota(positions.begin(), positions.end(), 0);
  }
  size_t at(int position) const {
    return (size_t(table[position / c.block_size]) * c.block_size + position % c.block_size) * c.kv_heads * c.dim;
  }
  Attention op() {
    Attention a{};
    a.query_heads = c.query_heads, a.kv_heads = c.kv_heads, a.head_dim = c.dim, a.kv_map = c.map.data();
    a.scale = 1.0f / std::sqrt(float(c.dim)), a.window = c.window, a.dtype = c.dtype, a.block_size = c.block_size;
    a.k_cache = k.data(), a.v_cache = v.data(), a.softcap = c.softcap;
    return a;
  }
  // Rows [begin, end) of the sequence (row = position) and heads into out; the scratch is exactly as large as asked.
  void attend(Buffer& out, int begin, int end, int head_begin, int head_end) {
    const Attention a = op();
    const Sequence sequence{begin, end, end, table.data(), nullptr, false};
    std::vector<float> scratch(simd::attend_scratch(a) + 1, NAN);
    scratch.back() = 7;
    const int64_t stride = c.query_heads * c.dim;
    serried::attend(a, sequence, positions.data(), q.data(), stride, out.data(), stride, begin, end, head_begin,
                    head_end, scratch.data());
    expect(scratch.back() == 7, "scratch is large enough");
  }
  Buffer all() {
    Buffer out(c.dtype, q.size(), NAN);
    attend(out, 0, c.length, 0, c.query_heads);
    return out;
  }

  const Case& c;
  Buffer k, v, q;
  std::vector<int32_t> table, positions;
};

std::vector<double> reference(const Cache& x, int row, int head) {
  const Case& c = x.c;
  const int low = c.window > 0 ? std::max(0, row + 1 - c.window) : 0, kv = c.map[head];
  std::vector<double> s, out(c.dim);
  double top = -INFINITY, total = 0;
  for (int p = low; p <= row; ++p) {
    double dot = 0;
    for (int i = 0; i < c.dim; ++i)
      dot += double(x.q[(size_t(row) * c.query_heads + head) * c.dim + i]) * x.k[x.at(p) + kv * c.dim + i];
    s.push_back(dot * (1.0f / std::sqrt(float(c.dim))));
    if (c.softcap > 0) s.back() = c.softcap * std::tanh(s.back() / c.softcap);
    top = std::max(top, s.back());
  }
  for (double& w : s) total += w = std::exp(w - top);
  for (int p = low; p <= row; ++p)
    for (int i = 0; i < c.dim; ++i) out[i] += s[p - low] / total * x.v[x.at(p) + kv * c.dim + i];
  return out;
}

long long elements = 0, rounded_off = 0;  // of outputs in bf16; those that are not the exact result, rounded

void check_attend(const Case& c, unsigned seed) {
  Cache x(c, seed);
  const Buffer whole = x.all();
  const double tolerance = c.dtype == Dtype::kFloat32 ? 3e-6 : 1e-2;
  std::mt19937 random(seed);
  for (int i = 0; i < 24; ++i) {
    const int row = i == 0 ? c.length - 1 : int(random() % c.length), head = int(random() % c.query_heads);
    const std::vector<double> want = reference(x, row, head);
    for (int d = 0; d < c.dim; ++d) {
      const double got = whole[(size_t(row) * c.query_heads + head) * c.dim + d];
      expect(std::abs(got - want[d]) <= tolerance * std::max(1.0, std::abs(want[d])), "attend against double");
      if (c.dtype == Dtype::kBFloat16) ++elements, rounded_off += got != widen(narrow(float(want[d])));
    }
  }
  // Every split of rows and heads, in any order, gives the same bits.
  for (int round = 0; round < 3; ++round) {
    Buffer out(c.dtype, x.q.size(), NAN);
    for (int begin = 0; begin < c.length;) {
      const int most = round == 0 ? 1 : round == 1 ? 7 : 100;
      const int end = std::min<int>(c.length, begin + 1 + int(random() % most));
      for (int h = 0; h < c.query_heads;) {
        const int next = std::min<int>(c.query_heads, h + 1 + int(random() % c.query_heads));
        x.attend(out, begin, end, h, next);
        h = next;
      }
      begin = end;
    }
    expect(out == whole, "attend: rows and heads split");
  }
  // Any block size and any order of the blocks.
  for (int block_size : {1, 7, 16, 32, 64}) {
    Case other = c;
    other.block_size = block_size;
    Cache y(other, seed, 2);
    expect(y.all() == whole, "attend: block size");
  }
  // What a row does not see may hold anything: later positions, and those that left the window.
  const int row = c.length / 2, low = c.window > 0 ? std::max(0, row + 1 - c.window) : 0;
  const auto same_row = [&](Cache& z, const Buffer& want, const char* what) {
    const size_t begin = size_t(row) * c.query_heads * c.dim, end = begin + c.query_heads * c.dim;
    expect(z.all().equals(want, begin, end), what);
    Buffer few(c.dtype, x.q.size(), NAN);
    z.attend(few, std::max(0, row - 2), std::min(c.length, row + 3), 0, c.query_heads);
    expect(few.equals(want, begin, end), what);
  };
  const auto mask = [&](Cache& z, auto value) {
    for (int p = 0; p < c.length; ++p) {
      if (p >= low && p <= row) continue;
      for (int i = 0; i < c.kv_heads * c.dim; ++i) {
        z.k.set(z.at(p) + i, value(p) * 0 == 0 ? 1 : NAN);
        z.v.set(z.at(p) + i, value(p));
      }
    }
  };
  Cache z(c, seed);
  mask(z, [](int p) { return p % 2 ? NAN : INFINITY; });
  same_row(z, whole, "attend: masked positions do not leak");
  // Nor do their signs, where all that is seen is zero or underflows to it.
  for (int p = low; p <= row; ++p)
    for (int i = 0; i < c.kv_heads * c.dim; ++i) z.v.set(z.at(p) + i, p == row ? -1.2e-38f : 0);
  mask(z, [](int p) { return p % 2 ? -1.0f : -3e38f; });
  const Buffer negative = z.all();
  mask(z, [](int p) { return p % 2 ? 1.0f : 3e38f; });
  same_row(z, negative, "attend: signs of masked positions do not leak");
}

void check_attends() {
  const std::vector<std::pair<int, std::vector<int32_t>>> maps = {{1, {0}},
                                                                  {2, {0, 0, 0, 1}},
                                                                  {3, {0, 0, 1, 1, 1, 2}},
                                                                  {2, {0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1}},
                                                                  {4, {3, 0, 1, 2}}};
  unsigned seed = 1;
  for (Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16})
    for (int dim : {2, 20, 24, 64, 80, 128, 256, 512})
      for (int length : {1, 31, 33, 300, 530}) {
        const auto& [kv_heads, map] = maps[seed % maps.size()];
        const int window = seed % 3 == 0 ? 1 + int(seed * 37 % 290) : 0;
        const float softcap = seed % 4 == 1 ? 0.3f : 0;
        check_attend({int(map.size()), kv_heads, dim, 5, window, length, map, dtype, softcap}, seed++);
      }
  check_attend({70, 1, 16, 16, 0, 90, std::vector<int32_t>(70, 0), Dtype::kBFloat16}, 999);
  expect(rounded_off * 100 < elements, "attend: weights are as good as float32's");
  std::printf("%lld of %lld outputs in bf16 are not rounded from the exact result\n", rounded_off, elements);
}

void check_rope_case(Dtype dtype, int dim, int rotary, bool norm) {
  const int heads = 3, kv_heads = 2, tokens = 5, slots = 9;
  std::mt19937 random(dim);
  const int64_t stride = (heads + 2 * kv_heads) * dim + 3;
  const auto qkv = normals(random, tokens * stride), weights = normals(random, 2 * dim);
  const auto cos = normals(random, 20 * dim / 2), sin = normals(random, 20 * dim / 2);
  const std::vector<int32_t> positions = {3, 4, 5, 19, 0}, places = {8, 0, 3, 7, 2};
  Buffer k(dtype, slots * kv_heads * dim, 5), v(dtype, slots * kv_heads * dim, 5), q(dtype, tokens * heads * dim, 5);
  Attention a{};
  a.query_heads = heads, a.kv_heads = kv_heads, a.head_dim = dim, a.rotary_dim = rotary, a.dtype = dtype;
  a.norm_eps = 1e-6f;
  a.cos = cos.data(), a.sin = sin.data(), a.k_cache = k.data(), a.v_cache = v.data();
  if (norm) a.q_norm = weights.data(), a.k_norm = weights.data() + dim;
  rope_write(a, qkv.data(), stride, positions.data(), places.data(), q.data(), heads * dim, 0, 2,
             {0, heads, 0, kv_heads});
  rope_write(a, qkv.data(), stride, positions.data(), places.data(), q.data(), heads * dim, 2, tokens,
             {0, 2, 0, 1});
  rope_write(a, qkv.data(), stride, positions.data(), places.data(), q.data(), heads * dim, 2, tokens,
             {2, heads, 1, kv_heads});
  const double tolerance = dtype == Dtype::kFloat32 ? 1e-6 : 5e-3;
  for (int t = 0; t < tokens; ++t)
    for (int h = 0; h < heads + kv_heads; ++h) {
      const float* x = qkv.data() + t * stride + h * dim;
      const float* w = h < heads ? a.q_norm : a.k_norm;
      double square = 0;
      for (int i = 0; i < dim; ++i) square += double(x[i]) * x[i];
      const double scale = norm ? 1 / std::sqrt(square / dim + 1e-6) : 1;
      for (int i = 0; i < dim; ++i) {
        const int half = rotary / 2, j = i % half;
        const double c = cos[positions[t] * half + j], s = sin[positions[t] * half + j];
        const double p = x[j] * scale * (norm ? w[j] : 1), r = x[half + j] * scale * (norm ? w[half + j] : 1);
        const double still = x[i] * scale * (norm ? w[i] : 1);
        const double want = i < half ? p * c - r * s : i < rotary ? r * c + p * s : still;
        const double got = h < heads ? q[(t * heads + h) * dim + i] : k[(places[t] * kv_heads + h - heads) * dim + i];
        expect(std::abs(got - want) <= tolerance * (1 + std::abs(want)), "rope_write against double");
      }
    }
  for (int t = 0; t < tokens; ++t)
    for (int i = 0; i < kv_heads * dim; ++i)
      expect(std::abs(v[places[t] * kv_heads * dim + i] - qkv[t * stride + (heads + kv_heads) * dim + i]) < 2e-2, "v");
  for (int i = 0; i < kv_heads * dim; ++i) expect(k[1 * kv_heads * dim + i] == 5, "other slots untouched");
}

// Speeds.

Cache speed_case(Case& c, int length) {
  c = {16, 8, 128, 16, 0, length, {}, Dtype::kBFloat16};
  for (int h = 0; h < 16; ++h) c.map.push_back(h / 2);
  return Cache(c, 1);
}

// Decode of one token, cold: as many copies of the cache as exceed the last-level share that one core may hope for.
void bench_decode(int context, int heads) {
  Case c;
  Cache x = speed_case(c, context);
  const size_t bytes = size_t(context) * 8 * 128 * 2;
  const size_t copies = std::max<size_t>(2, (size_t(512) << 20) / (2 * bytes));
  Huge keys(copies * (bytes + 65536)), values(copies * (bytes + 65536));
  for (size_t i = 0; i < copies; ++i) {
    for (int p = 0; p < context; ++p) {
      const size_t to = i * bytes + size_t(p) * 2048;
      std::memcpy(keys.data() + to, static_cast<char*>(x.k.data()) + x.at(p) * 2, 2048);
      std::memcpy(values.data() + to, static_cast<char*>(x.v.data()) + x.at(p) * 2, 2048);
    }
  }
  std::iota(x.table.begin(), x.table.end(), 0);
  Attention a = x.op();
  std::vector<float> scratch(simd::attend_scratch(a));
  Buffer out(c.dtype, x.q.size(), 0);
  const Sequence sequence{context - 1, context, context, x.table.data(), nullptr, false};
  const auto once = [&](size_t i) {
    a.k_cache = keys.data() + i * bytes, a.v_cache = values.data() + i * bytes;
    for (int h = 0; h < 16; h += heads)
      attend(a, sequence, x.positions.data(), x.q.data(), 2048, out.data(), 2048, context - 1, context, h, h + heads,
             scratch.data());
  };
  const auto each = [&] {
    for (size_t i = 0; i < copies; ++i) once(i);
  };
  const auto again = [&] {
    for (int i = 0; i < 20; ++i) once(0);
  };
  const double cold = best(each, 5) / copies, warm = best(again, 10) / 20;
  std::printf("attend decode, context %4d, %2d heads a call: %6.1f GB/s from memory, %6.1f again in cache (%.1f us)\n",
              context, heads, 2e-9 * bytes / cold, 2e-9 * bytes / warm, warm * 1e6);
}

void bench_prefill(int tokens, double peak) {
  Case c;
  Cache x = speed_case(c, tokens);
  const Attention a = x.op();
  std::vector<float> scratch(simd::attend_scratch(a));
  Buffer out(c.dtype, x.q.size(), 0);
  const Sequence sequence{0, tokens, tokens, x.table.data(), nullptr, false};
  const double time = best(
      [&] {
        attend(a, sequence, x.positions.data(), x.q.data(), 2048, out.data(), 2048, 0, tokens, 0, 16, scratch.data());
      },
      10);
  const double flops = 4.0 * 16 * 128 * tokens * (tokens + 1) / 2;
  std::printf("attend prefill, %4d tokens: %7.1f GFLOP/s of the causal half, %.0f %% of the float32 FMA rate (%.0f)\n",
              tokens, 1e-9 * flops / time, 100e-9 * flops / time / peak, peak);
}

void bench() {
  const double peak = fma_rate();
  std::printf("read of memory, one core: %.1f GB/s\n", read_rate());
  for (int context : {128, 512, 4096}) bench_decode(context, 16);
  for (int context : {128, 512, 4096}) bench_decode(context, 2);
  bench_prefill(512, peak);
  bench_prefill(2048, peak);
  bench_pointwise();
}

}  // namespace
}  // namespace serried

int main(int count, char** arguments) {
  using namespace serried;
  if (!runs_here()) return kSkipped;
  begin();
  const std::string only = count > 1 ? arguments[1] : "";
  if (only != "bench") {
    check_pointwise();
    for (Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16})
      for (int dim : {2, 20, 24, 64, 80, 128, 256})
        for (bool norm : {false, true})
          for (int rotary : {dim, 2, std::max(2, dim / 4 * 2)}) check_rope_case(dtype, dim, rotary, norm);
    check_attends();
    std::printf("%lld checks, %lld failures\n", checks, failures);
  }
  if (only != "check") bench();
  return failures > 0;
}
