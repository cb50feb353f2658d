// Python's way to the choice of tokens outside a step: arrays of numpy in, numbers out.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "program/choose.hpp"

namespace serried {

namespace nb = nanobind;

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using DoubleRows = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using LongRows = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// See pick_rows; with arrays of numpy.
inline void pick(Program& p, Logits logits, int64_t own, int64_t first, Doubles temperatures,
          nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig> seeds, Ints positions, Longs indices, Doubles scores) {
  const auto rows = static_cast<int64_t>(temperatures.size());
  const auto of = [t = temperatures.data(), s = seeds.data(), at = positions.data()](int64_t row) {
    return Pick{t[row], s[row], at[row]};
  };
  nb::gil_scoped_release release;
  const int64_t start = now_ns();
  std::vector<Candidate> best(static_cast<size_t>(rows));
  pick_rows(p, {logits.data(), static_cast<int64_t>(logits.shape(1)), own, first}, rows, of, best.data());
  for (size_t row = 0; row < best.size(); ++row) {
    indices.data()[row] = best[row].token - first;
    scores.data()[row] = best[row].score;
  }
  p.times.total += now_ns() - start;
}

// What a rank says of some rows of its logits: see SurveyFn. counts: [rows, possible | found], of which `found` says
// first how many places are wanted at most. sums: for which rows leaves are to be summed.
inline void survey(Program& p, Logits logits, int64_t own, Ints rows, Doubles divisors, Ints sums, LongRows counts,
            LongRows places, DoubleRows leaf_max, DoubleRows leaf_sum) {
  const auto count = static_cast<int64_t>(rows.size());
  const auto leaves = static_cast<int64_t>(leaf_max.shape(1));
  if (count != static_cast<int64_t>(counts.shape(0)) || 64 * leaves < own) throw std::invalid_argument("survey: shapes");
  nb::gil_scoped_release release;
  const int64_t start = now_ns();
  over_rows(p.pool, count, own, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      int64_t* numbers = counts.data() + 2 * row;
      SurveyRow found{0, 0, places.data() + row * static_cast<int64_t>(places.shape(1)),
                      leaf_max.data() + row * leaves, sums.data()[row] ? leaf_sum.data() + row * leaves : nullptr};
      const int64_t wanted = std::min(numbers[1], static_cast<int64_t>(places.shape(1)));
      p.k.survey(logits.data() + rows.data()[row] * static_cast<int64_t>(logits.shape(1)), own, wanted,
                 divisors.data()[row], &found);
      numbers[0] = found.possible, numbers[1] = found.found;
    }
  });
  p.times.total += now_ns() - start;
}

}  // namespace serried
