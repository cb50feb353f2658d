// How operators meet the other ranks: each writes its slot, then reads all slots.
#pragma once
#include <utility>

#include "comm/region.hpp"
#include "program/operators.hpp"

namespace serried {

// Says that this rank's slot is written, does something meanwhile, and waits until all ranks have said so. Returns when
// that was.
template <class Meanwhile>
int64_t meet(Program& p, Meanwhile&& meanwhile) {
  p.comm->post();
  const int64_t posted = now_ns();
  meanwhile();
  const int64_t before = now_ns();
  p.comm->leave_out(before - posted);
  p.comm->wait();
  const int64_t arrived = now_ns();
  p.times.wait += arrived - before;
  return arrived;
}

inline int64_t meet(Program& p) {
  return meet(p, [] {});
}

// Runs one exchange: write(slot) fills this rank's slot, meanwhile() is for what others need not wait for, then read()
// uses all ranks' slots. more: see begin.
template <class Write, class Meanwhile, class Read>
void exchange(Program& p, Op op, size_t bytes, bool more, Write&& write, Meanwhile&& meanwhile, Read&& read) {
  write(static_cast<char*>(p.comm->begin(op, bytes, more)));
  const int64_t arrived = meet(p, meanwhile), waited = p.times.wait;
  read();
  p.comm->end();
  p.times.exchange += now_ns() - arrived - (p.times.wait - waited);
}

template <class Write, class Read>
void exchange(Program& p, Op op, size_t bytes, bool more, Write&& write, Read&& read) {
  exchange(p, op, bytes, more, write, [] {}, read);
}

}  // namespace serried
