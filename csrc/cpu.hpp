// Which of our instruction sets this CPU and its kernel can run.
#pragma once
#include <string>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace serried {

#if defined(__x86_64__)
// AMX: the CPU has tiles with bf16, and the kernel lets this process use their 8 KiB of state.
inline bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBf16 = 1U << 22, kTile = 1U << 24;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return (d & kBf16) && (d & kTile) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// vpdpbusd in 256 bits, encoded as AVX2 is: Alder Lake's cores and their successors, but no Zen before the fifth.
inline bool has_avx_vnni() {
  unsigned a, b, c, d;
  constexpr unsigned kAvxVnni = 1U << 4;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAvxVnni);
}
#endif

inline std::vector<std::string> cpu_isas() {
  std::vector<std::string> isas{"baseline"};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return isas;
  isas.emplace_back("avx2");
  if (has_avx_vnni()) isas.emplace_back("avx2_vnni");
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")))
    return isas;
  isas.emplace_back("avx512");
  if (!(__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))) return isas;
  isas.emplace_back("avx512_bf16");
  if (has_amx()) isas.emplace_back("amx");
#endif
  return isas;
}

}  // namespace serried
