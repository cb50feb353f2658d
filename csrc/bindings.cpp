// The Python module: kernels of one instruction set, weights, a rank's threads, its program, its collectives.
#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench.hpp"
#include "comm/bindings_comm.hpp"
#include "cpu.hpp"
#include "kernels/kernels.hpp"
#include "program/bindings_choose.hpp"
#include "program/pool.hpp"
#include "program/program.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace serried {
namespace {

// One instruction set's kernels, opened from their own shared object, which stays open.
struct KernelSet {
  const Kernels* table;
  explicit KernelSet(const std::string& path) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) throw std::runtime_error(dlerror());
    auto* open = reinterpret_cast<const Kernels* (*)()>(dlsym(handle, "serried_kernels"));
    if (!open) throw std::runtime_error(path + ": has no serried_kernels");
    table = open();
  }
};

Dtype dtype_of(const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBFloat16;
  throw std::invalid_argument("dtype " + name + ": the native kernels take float32 and bfloat16");
}

// Of what is multiplied, which may be int8 too.
Dtype factor_of(const std::string& name) { return name == "int8" ? Dtype::kInt8 : dtype_of(name); }

Format format_of(const std::string& name) {
  if (name == "float32") return Format::kFloat32;
  if (name == "bfloat16") return Format::kBFloat16;
  if (name == "int8") return Format::kInt8;
  if (name == "int4") return Format::kInt4;
  if (name == "int4_min") return Format::kInt4Min;
  throw std::invalid_argument("format " + name + ": weights are float32, bfloat16, int8, int4 or int4_min");
}

const char* name_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? "float32" : dtype == Dtype::kBFloat16 ? "bfloat16" : "int8";
}

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_pytorch_tanh") return Activation::kGeluTanh;
  throw std::invalid_argument("activation " + name + ": the native kernels have silu, gelu, gelu_pytorch_tanh");
}

// The memory of a rank's weights and KV cache.
class Store {
 public:
  explicit Store(const KernelSet& kernels) : k_(*kernels.table) {}

  Weight linear(int64_t outputs, int64_t columns, const std::string& format) {
    Weight weight{format_of(format), outputs, columns, round_up(columns, kPad), nullptr};
    weight.data = arena_.allocate(static_cast<size_t>(weight.bytes()));
    return weight;
  }

  Weight vector(int64_t size) {
    return {Format::kFloat32, size, 0, 0, arena_.allocate(static_cast<size_t>(round_up(size, kTile)) * sizeof(float))};
  }

  // Rows of a linear's weight, from row-major memory of float32 or bf16: rounded, or quantized a few rows at a time.
  void write(const Weight& weight, int64_t row, int64_t rows, uintptr_t source, const std::string& from,
             int64_t stride) const {
    check_rows(weight, row, rows);
    const Dtype dtype = dtype_of(from);
    const auto inputs = static_cast<int32_t>(weight.inputs);
    const auto* values = reinterpret_cast<const char*>(source);
    if (!quantized(weight.format)) {
      k_.pack(weight.data, weight.format, inputs, row, rows, values, dtype, weight.columns, stride);
      return;
    }
    const int64_t groups = weight.inputs / kGroup, width = groups * block_bytes(weight.format);
    const int64_t piece = std::max<int64_t>(1, kScratch / std::max<int64_t>(1, width));
    std::vector<char> blocks(static_cast<size_t>(std::min(piece, rows) * width));
    for (int64_t first = 0; first < rows; first += piece) {
      const int64_t count = std::min(piece, rows - first);
      const char* at = values + static_cast<size_t>(first * stride) * bytes_of(dtype);
      k_.quantize(weight.format, at, dtype, count, weight.columns, stride, blocks.data(), width);
      k_.pack_blocks(weight.data, weight.format, inputs, row + first, count, blocks.data(), groups, width);
    }
  }

  // The same from rows of blocks of GGML that are in the weight's format already.
  void write_blocks(const Weight& weight, int64_t row, int64_t rows, uintptr_t blocks, int64_t stride) const {
    check_rows(weight, row, rows);
    if (!quantized(weight.format)) throw std::invalid_argument("blocks for a weight that is not quantized");
    const int64_t groups = weight.inputs / kGroup;
    if (stride < groups * block_bytes(weight.format)) throw std::out_of_range("rows of too few blocks");
    k_.pack_blocks(weight.data, weight.format, static_cast<int32_t>(weight.inputs), row, rows,
                   reinterpret_cast<const void*>(blocks), groups, stride);
  }

  void write_vector(const Weight& weight, int64_t at, Floats values) const {
    if (at < 0 || at + static_cast<int64_t>(values.size()) > weight.outputs)
      throw std::out_of_range("elements beyond the vector's");
    std::memcpy(static_cast<float*>(weight.data) + at, values.data(), values.size() * sizeof(float));
  }

  uintptr_t allocate(size_t bytes) { return reinterpret_cast<uintptr_t>(arena_.allocate(bytes)); }

 private:
  static constexpr int64_t kScratch = 1 << 18;  // bytes of blocks on their way into tiles, in a second-level cache

  static void check_rows(const Weight& weight, int64_t row, int64_t rows) {
    if (row < 0 || rows < 0 || row + rows > weight.outputs) throw std::out_of_range("rows beyond the weight's");
  }

  const Kernels& k_;
  Arena arena_;
};

// Columns between rows of x that a linear by itself takes; those of int8 come in whole tiles.
int64_t input_stride(const Weight& weight) {
  return quantized(weight.format) ? round_up(weight.inputs, kTile) : weight.inputs;
}

// Sizes of the ten arrays, then the arrays: see StepInput.pack in serried/backends/step.py.
Step unpack(const Ints& flat, Logits& logits) {
  constexpr int kArrays = 10;  // the last, what else is wanted of the logits, is not the program's business
  const int32_t* data = flat.data();
  if (flat.size() < kArrays) throw std::invalid_argument("a step is too short");
  const int32_t* at[kArrays];
  int64_t offset = kArrays;
  for (int i = 0; i < kArrays; ++i) {
    at[i] = data + offset;
    if (data[i] < 0) throw std::invalid_argument("a step with a negative size");
    offset += data[i];
  }
  if (offset != static_cast<int64_t>(flat.size())) throw std::invalid_argument("a step of the wrong size");
  if (static_cast<int64_t>(logits.shape(0)) < data[7]) throw std::invalid_argument("too few rows for the logits");
  return {at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], data[0], data[4], data[7],
          logits.data(), at[8], data[8] / Pick::kWords};
}

Attention attention_of(int query_heads, int kv_heads, int head_dim, int rotary_dim, float scale, float softcap,
                       int window, const std::string& dtype, const Weight* q_norm, const Weight* k_norm, float eps,
                       const Weight& cos, const Weight& sin, uintptr_t k_cache, uintptr_t v_cache, int block_size) {
  const auto floats = [](const Weight* w) { return w ? static_cast<const float*>(w->data) : nullptr; };
  return {query_heads, kv_heads, head_dim, rotary_dim, nullptr, scale, softcap, window,
          dtype_of(dtype), floats(q_norm), floats(k_norm), eps, floats(&cos), floats(&sin),
          reinterpret_cast<void*>(k_cache), reinterpret_cast<void*>(v_cache), block_size};
}

void bind_program(nb::module_& m) {
  nb::class_<Plan>(m, "Plan")
      .def("__init__",
           [](Plan* self, std::vector<int32_t> counts, const std::vector<std::vector<int32_t>>& adds, int32_t result,
              const std::vector<std::vector<int32_t>>& leaves) {
             new (self) Plan{};
             self->counts = std::move(counts);
             self->result = result;
             for (const auto& pair : adds) self->adds.push_back({pair.at(0), pair.at(1)});
             for (const auto& leaf : leaves) self->leaves.push_back({leaf.at(0), leaf.at(1), leaf.at(2), leaf.at(3)});
           },
           "counts"_a, "adds"_a, "result"_a, "leaves"_a);
  nb::class_<Attention>(m, "Attention").def("__init__", [](Attention* self, int query_heads, int kv_heads, int head_dim,
      int rotary_dim, float scale, float softcap, int window, const std::string& dtype, const Weight* q_norm,
      const Weight* k_norm, float eps, const Weight& cos, const Weight& sin, uintptr_t k_cache, uintptr_t v_cache,
      int block_size) {
        new (self) Attention(attention_of(query_heads, kv_heads, head_dim, rotary_dim, scale, softcap, window, dtype,
                                          q_norm, k_norm, eps, cos, sin, k_cache, v_cache, block_size));
      }, "query_heads"_a, "kv_heads"_a, "head_dim"_a, "rotary_dim"_a, "scale"_a, "softcap"_a,
      "window"_a, "dtype"_a, "q_norm"_a.none(), "k_norm"_a.none(), "eps"_a, "cos"_a, "sin"_a, "k_cache"_a, "v_cache"_a,
      "block_size"_a);
  nb::class_<Program>(m, "Program")
      .def("__init__",
           [](Program* self, const KernelSet& kernels, Pool& pool, ShmComm* comm, int64_t tokens, int64_t rows,
              int64_t two_shot_from, int64_t apart_from, const std::string& dtype) {
             new (self) Program(*kernels.table, pool, comm, tokens, rows, two_shot_from, apart_from, dtype_of(dtype));
           },
           "kernels"_a, "pool"_a, "comm"_a.none(), "max_tokens"_a, "max_logit_rows"_a, "two_shot_from"_a,
           "apart_from"_a, "dtype"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("embed", &Program::embed)
      .def("norm", &Program::norm)
      .def("linear", &Program::linear, "x"_a, "weight"_a, "bias"_a.none())
      .def("linear_nodes", &Program::linear_nodes)
      .def("reduce", &Program::reduce, "nodes"_a, "plan"_a, "bias"_a.none(), "columns"_a)
      .def("reduce_add_norm", &Program::reduce_add_norm, "nodes"_a, "plan"_a, "bias"_a.none(), "residual"_a, "weight"_a,
           "eps"_a)
      .def("norm_add_norm", &Program::norm_add_norm)
      .def("activation", [](Program& p, int x, const std::string& name) { return p.activation(x, activation_of(name)); })
      .def("gated", [](Program& p, int x, const std::string& name) { return p.gated(x, activation_of(name)); })
      .def("attention", &Program::attention)
      .def("columns", &Program::columns)
      .def("gather_columns", &Program::gather_columns)
      .def("select_rows", &Program::select_rows)
      .def("logits", &Program::logits)
      .def("dtype", [](Program& p, int x) { return name_of(p.dtype(x)); })
      .def("finish", &Program::finish)
      .def_prop_ro("operators", &Program::operators)
      .def_prop_ro("buffer_bytes", &Program::buffer_bytes)
      .def("run", [](Program& p, Ints flat, Logits logits) {
        const Step step = unpack(flat, logits);
        nb::gil_scoped_release release;
        p.run(step);
      })
      .def("choose", [](Program& p, Ints flat, Logits logits, int64_t own, int64_t first, Longs tokens) {
        const Step step = unpack(flat, logits);
        if (static_cast<int64_t>(tokens.size()) < step.logit_count) throw std::invalid_argument("too few tokens");
        nb::gil_scoped_release release;
        choose(p, step, own, first, tokens.data());
      })
      .def("pick", &pick)
      .def("survey", &survey)
      .def("times", [](Program& p) {
        const Times t = p.times;
        return std::vector<int64_t>{t.steps, t.total, t.wait, t.exchange};
      })
      .def("reset_times", [](Program& p) { p.times = Times{}; });
}

void bind_bench(nb::module_& m) {

  m.def("read_seconds", [](const KernelSet& k, Pool& pool, uintptr_t data, size_t bytes) {
    nb::gil_scoped_release release;
    return read_seconds(*k.table, pool, reinterpret_cast<const void*>(data), bytes);
  });
  m.def("multiply_rate", [](const KernelSet& k, Pool& pool, const std::string& dtype, int64_t iterations) {
    nb::gil_scoped_release release;
    return multiply_rate(*k.table, pool, factor_of(dtype), iterations);
  });
  m.def("linear_seconds", [](const KernelSet& k, Pool& pool, const Weight& w, const Plan* plan, uintptr_t x, uintptr_t y,
                             int32_t tokens) {
    nb::gil_scoped_release release;
    const Linear linear{w.data, nullptr, nullptr, 1, 1, static_cast<int32_t>(w.inputs), w.tiles()};
    return linear_seconds(*k.table, pool, linear, w.format, plan ? plan->leaves : std::vector<Leaf>{},
                          reinterpret_cast<const void*>(x), input_stride(w), reinterpret_cast<float*>(y), tokens);
  }, "kernels"_a, "pool"_a, "weight"_a, "plan"_a.none(), "x"_a, "y"_a, "tokens"_a);
}

}  // namespace
}  // namespace serried

NB_MODULE(_core, m) {
  using namespace serried;
  nb::class_<KernelSet>(m, "KernelSet")
      .def(nb::init<const std::string&>())
      .def_prop_ro("isa", [](const KernelSet& k) { return k.table->isa; })
      .def("begin_thread", [](const KernelSet& k) { k.table->begin_thread(); })
      .def("gumbel_noise", [](const KernelSet& k, uint64_t seed, uint32_t position, Longs ids, Doubles noise) {
        const auto n = static_cast<int64_t>(std::min(ids.size(), noise.size()));
        k.table->gumbel_noise(seed, position, ids.data(), n, noise.data());
      })
      .def("quantize", [](const KernelSet& k, const std::string& format, uintptr_t source, const std::string& from,
                          int64_t rows, int64_t columns, int64_t stride, uintptr_t blocks, int64_t block_stride) {
        const Format to = format_of(format);
        const Dtype dtype = dtype_of(from);
        nb::gil_scoped_release release;
        k.table->quantize(to, reinterpret_cast<const void*>(source), dtype, rows, columns, stride,
                          reinterpret_cast<void*>(blocks), block_stride);
      })
      .def("repack_q4_k", [](const KernelSet& k, uintptr_t source, int64_t stride, int64_t rows, int64_t superblocks,
                             uintptr_t blocks, int64_t block_stride) {
        nb::gil_scoped_release release;
        k.table->repack_q4_k(reinterpret_cast<const void*>(source), stride, rows, superblocks,
                             reinterpret_cast<void*>(blocks), block_stride);
      })
      .def("multiply", [](const KernelSet& k, const std::string& dtype, int64_t n) {
        nb::gil_scoped_release release;
        return k.table->multiply(factor_of(dtype), n);
      })
      .def("read", [](const KernelSet& k, uintptr_t data, size_t n) {
        nb::gil_scoped_release release;
        return k.table->read(reinterpret_cast<const void*>(data), n);
      });
  nb::class_<Weight>(m, "Weight")
      .def_ro("outputs", &Weight::outputs)
      .def_ro("columns", &Weight::columns)
      .def_ro("padded_inputs", &Weight::inputs)
      .def_prop_ro("bytes", &Weight::bytes)
      .def_prop_ro("input_bytes", [](const Weight& w) { return row_bytes(input_of(w.format), input_stride(w)); })
      .def_prop_ro("padded_outputs", [](const Weight& w) { return int64_t{w.tiles()} * kTile; });
  nb::class_<Store>(m, "Store")
      .def(nb::init<const KernelSet&>(), nb::keep_alive<1, 2>())
      .def("linear", &Store::linear)
      .def("vector", &Store::vector)
      .def("write", &Store::write, nb::call_guard<nb::gil_scoped_release>())
      .def("write_blocks", &Store::write_blocks, nb::call_guard<nb::gil_scoped_release>())
      .def("write_vector", &Store::write_vector)
      .def("allocate", &Store::allocate);
  nb::class_<Pool>(m, "Pool")
      .def("__init__", [](Pool* self, int threads, std::vector<int> cpus, const KernelSet& k) {
        new (self) Pool(threads, std::move(cpus), k.table->begin_thread);
      })
      .def_prop_ro("threads", &Pool::threads);
  bind_program(m);
  bind_comm(m);
  bind_bench(m);
  m.def("cpu_isas", &cpu_isas, "The instruction sets that this CPU and its kernel can run, the plainest first.");
}
