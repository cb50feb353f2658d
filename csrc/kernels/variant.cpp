// One variant of the kernels: this file is compiled once per instruction set, into a shared object of its own with
// hidden symbols (a shared inline function compiled for AVX-512 would be a crash on another machine).
#include "attention.hpp"
#include "linear.hpp"
#include "pointwise.hpp"
#include "sampling.hpp"
#include "survey.hpp"

namespace serried {
namespace {

constexpr Kernels kKernels = {
    SERRIED_ISA_NAME,
    begin_thread,
    {linear_f32, linear_bf16, linear_quantized<Format::kInt8>, linear_quantized<Format::kInt4>,
     linear_quantized<Format::kInt4Min>},
    pack,
    quantize,
    pack_blocks,
    repack_q4_k,
    unpack_row,
    norm,
    reduce_add_norm,
    fold,
    norm_add_norm,
    gated,
    activate,
    softcap,
    round_rows,
    rope_write,
    attend,
    attend_scratch,
    argmax,
    survey,
    gumbel_argmax,
    gumbel_noise,
    add,
    read_bytes,
    multiply,
};

}  // namespace
}  // namespace serried

extern "C" __attribute__((visibility("default"))) const serried::Kernels* serried_kernels() {
  return &serried::kKernels;
}
