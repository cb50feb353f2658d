// A check of an instruction set that this machine lacks is skipped, by an exit status that ctest knows.
#pragma once
#include <algorithm>
#include <cstdio>

#include "../cpu.hpp"

namespace serried {
namespace {

constexpr int kSkipped = 77;

bool runs_here() {
  const auto isas = cpu_isas();
  if (std::find(isas.begin(), isas.end(), SERRIED_ISA_NAME) != isas.end()) return true;
  std::printf("%s: not on this machine\n", SERRIED_ISA_NAME);
  return false;
}

}  // namespace
}  // namespace serried
