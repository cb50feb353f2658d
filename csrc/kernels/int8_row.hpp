// Where a row of activations in int8 has its parts; what they hold: see Dtype in kernels.hpp.
#pragma once
#include <type_traits>

#include "kernels.hpp"

namespace serried {
namespace {

// Byte: char or const char.
template <class Byte>
struct Int8Row {
  template <class T>
  using Part = std::conditional_t<std::is_const_v<Byte>, const T, T>;

  Part<int8_t>* high;
  Part<float>* scales;
  Part<int32_t>* sums;
  Part<uint8_t>* fine;
  Part<int8_t>* low;

  Int8Row(Byte* row, int64_t stride)
      : high(reinterpret_cast<Part<int8_t>*>(row)), scales(reinterpret_cast<Part<float>*>(row + stride)),
        sums(reinterpret_cast<Part<int32_t>*>(scales + stride / kGroup)),
        fine(reinterpret_cast<Part<uint8_t>*>(sums + stride / kGroup)),
        low(reinterpret_cast<Part<int8_t>*>(fine + stride / kGroup)) {}
};

}  // namespace
}  // namespace serried
