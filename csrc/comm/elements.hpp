// Element-wise sums over the ranks' parts, in one order.
#pragma once
#include <cstddef>
#include <cstdint>

namespace serried {

enum class Element : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kInt32 = 4, kInt64 = 5 };

size_t width(Element element);

// out = sources[0] + sources[1] + ..., element by element and in this order; 16-bit floats in float32, rounded once;
// integers wrap. out overlaps no source.
void sum(Element element, void* out, const void* const* sources, int count, int64_t elements);

// out += in, for the ring. No 16-bit floats: they would be rounded at each hop.
void add(Element element, void* out, const void* in, int64_t elements);

void widen(Element half, const void* in, float* out, int64_t elements);
void narrow(Element half, const float* in, void* out, int64_t elements);

// How numbered rows become one: for each pair (to, from) in turn, row `to` += row `from`; then row `result` is it.
struct Fold {
  const int32_t* pairs;  // [pair_count][2]
  int32_t pair_count;
  int32_t rows;
  int32_t result;
};

constexpr int64_t kFoldBlock = 256;  // columns folded at a time: 64 rows of them fit a level-2 cache

// rows: [fold.rows] pointers, left as they are; scratch: fold.rows * kFoldBlock floats; values: fold.rows pointers.
void fold_rows(const Fold& fold, const float* const* rows, float* out, int64_t columns, float* scratch,
               const float** values);

}  // namespace serried
