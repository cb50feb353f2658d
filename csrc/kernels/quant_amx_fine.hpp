// The low parts of fine groups, for quantized linears by AMX (see quant_amx.hpp): of a chunk of strips, the tokens for
// which a group is fine are put side by side, whatever strip they are of, so that tiles of their own are full.
#pragma once
#include <algorithm>
#include <cstring>

#include "amx_tiles.hpp"
#include "int8_row.hpp"
#include "quant_amx.hpp"

namespace serried {
namespace {
namespace linear_detail {
namespace amx {

class FineChunk {
 public:
  // tokens: of a strip; `row` gives the Int8Row of a strip's token.
  template <class F>
  void take(int32_t strips, int32_t tokens, int32_t groups, F&& row) {
    groups_ = groups;
    step_ = tokens;
    const int64_t starts = int64_t{strips} * groups + 1, numbers = starts + 2 * groups + 1;
    starts_ = reinterpret_cast<int32_t*>(numbers_.take(static_cast<size_t>(numbers) * sizeof(int32_t)));
    counts_ = starts_ + starts;
    places_ = counts_ + groups;
    count_tokens(strips, row);
    if (places_[groups] == 0) return;
    tokens_.take(static_cast<size_t>(starts_[starts - 1]) * sizeof(FineToken));
    x_.take(static_cast<size_t>(places_[groups]) * kGroup);
    sums_.take(static_cast<size_t>(kBlockGroups) * 2 * most_ * kLowBytes);
    copy(strips, row);
  }

  int32_t count(int32_t group) const { return counts_[group]; }
  // Of a strip, for which any of so many groups is fine.
  void tokens(QuantUnit& unit, int32_t strip, int32_t group, int32_t groups) const {
    const int32_t* starts = starts_ + int64_t{strip} * groups_ + group;
    const auto* all = reinterpret_cast<const FineToken*>(tokens_.data());
    unit.fine = all + starts[0];
    unit.fine_end = all + starts[groups];
  }
  // Where low sums of half a tile begin, if `group` is the block's group `block_group`.
  const char* low(int32_t group, int32_t block_group, int half) const {
    return sums_.data() + (int64_t{block_group - group} * 2 + half) * most_ * kLowBytes;
  }

  // weights: of the first half of the tile's outputs, and `apart` bytes further of the second. No unit may be waiting.
  void multiply(int32_t group, int32_t block_group, const char* weights, int64_t apart) {
    const char* x = x_.data() + int64_t{places_[group]} * kGroup;
    char* to = sums_.data() + int64_t{block_group} * 2 * most_ * kLowBytes;
    for (int32_t i = 0; i < counts_[group]; i += step_, x += step_ * kGroup, to += step_ * kLowBytes) {
      load<4>(x, kGroup);
      part<0>(weights);
      part<1>(weights + 64);
      part<2>(weights + apart);
      part<3>(weights + apart + 64);
      store<0>(to, kLowBytes);
      store<1>(to + 64, kLowBytes);
      store<2>(to + most_ * kLowBytes, kLowBytes);
      store<3>(to + most_ * kLowBytes + 64, kLowBytes);
    }
  }

 private:
  template <int kPart>
  static void part(const char* weights) {
    zero<kPart>();
    load<6 + kPart % 2>(weights, 128);
    multiply_add_bytes<kPart, 4, 6 + kPart % 2>();
  }

  // Places: with room for what the last tile of a group has too many.
  template <class F>
  void count_tokens(int32_t strips, F&& row) {
    std::memset(counts_, 0, groups_ * sizeof(int32_t));
    int32_t total = 0, *start = starts_;
    for (int32_t strip = 0; strip < strips; ++strip, start += groups_) {
      std::memset(start, 0, groups_ * sizeof(int32_t));
      for (int32_t m = 0; m < step_; ++m) {
        const uint8_t* fine = row(strip, m).fine;
        for (int32_t g = 0; g < groups_; ++g) start[g] += fine[g];
      }
      for (int32_t g = 0; g < groups_; ++g) {
        const int32_t count = start[g];
        counts_[g] += count;
        start[g] = total;
        total += count;
      }
    }
    *start = total;
    most_ = places_[0] = 0;
    for (int32_t g = 0; g < groups_; ++g) {
      const int32_t places = counts_[g] ? counts_[g] + kRows : 0;
      places_[g + 1] = places_[g] + places;
      most_ = std::max(most_, places);
    }
  }

  template <class F>
  void copy(int32_t strips, F&& row) {
    std::memset(counts_, 0, groups_ * sizeof(int32_t));
    auto* token = reinterpret_cast<FineToken*>(tokens_.data());
    const int32_t* start = starts_;
    for (int32_t strip = 0; strip < strips; ++strip) {
      for (int32_t g = 0; g < groups_; ++g, ++start) {
        if (start[0] == start[1]) continue;
        for (int32_t m = 0; m < step_; ++m) {
          const Int8Row from = row(strip, m);
          if (!from.fine[g]) continue;
          const int32_t place = counts_[g]++;
          std::memcpy(x_.data() + (int64_t{places_[g]} + place) * kGroup, from.low + g * kGroup, kGroup);
          *token++ = {g * kGroupTiles + m * 64, (g * 2 * most_ + place) * kLowBytes};
        }
      }
    }
  }

  int32_t groups_, step_;
  int32_t most_;     // places of a group
  int32_t* starts_;  // [strips][groups], and the end: of their first tokens in tokens_
  int32_t* counts_;  // [groups]
  int32_t* places_;  // [groups + 1]: of the groups' first tokens in x_
  Scratch numbers_;
  Scratch tokens_;
  Scratch x_;        // int8 [places][32]
  Scratch sums_;     // int32 [8 groups][2 halves][most][32 outputs]
};

}  // namespace amx
}  // namespace linear_detail
}  // namespace
}  // namespace serried
