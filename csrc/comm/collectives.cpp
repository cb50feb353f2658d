// Whole operations over raw memory, made of steps.
#include <algorithm>
#include <cstring>

#include "comm/region.hpp"

namespace serried {

namespace {

// Rank r's share of n things, in whole `grain`s: [first, second).
std::pair<int64_t, int64_t> share(int64_t n, int rank, int size, int64_t grain) {
  const int64_t grains = (n + grain - 1) / grain;
  return {std::min(n, grains * rank / size * grain), std::min(n, grains * (rank + 1) / size * grain)};
}

int64_t total_of(const int64_t* parts, int size) {
  int64_t total = 0;
  for (int r = 0; r < size; ++r) total += parts[r];
  return total;
}

const char* at(const void* data, int64_t offset) { return static_cast<const char*>(data) + offset; }
char* at(void* data, int64_t offset) { return static_cast<char*>(data) + offset; }

// Nothing may come from a null pointer: empty arrays have one.
void copy(void* to, const void* from, size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

// Bytes [begin, end) of a contiguous [rows, part] go to their places in rows of `stride` bytes.
void scatter_rows(const char* in, int64_t begin, int64_t end, int64_t part, char* out, int64_t stride) {
  while (begin < end) {
    const int64_t row = begin / part, column = begin % part, n = std::min(part - column, end - begin);
    std::memcpy(out + row * stride + column, in, n);
    in += n;
    begin += n;
  }
}

constexpr int64_t kLine = 64;  // shares are whole cache lines: no two ranks write to the same one

}  // namespace

void ShmComm::all_reduce(void* x, int64_t count, Element element, Algorithm algorithm) {
  Call call(*this, Op::kAllReduce, count * width(element));
  if (algorithm != Algorithm::kRing) {
    return all_reduce_shots(static_cast<char*>(x), count, element, algorithm == Algorithm::kTwoShot);
  }
  if (element != Element::kBFloat16 && element != Element::kFloat16) {
    return all_reduce_ring(static_cast<char*>(x), count, element);
  }
  std::vector<float> wide(count);
  widen(element, x, wide.data(), count);
  all_reduce_ring(reinterpret_cast<char*>(wide.data()), count, Element::kFloat32);
  narrow(element, wide.data(), x, count);
}

void ShmComm::all_reduce_shots(char* x, int64_t count, Element element, bool two) {
  const int64_t w = width(element), room = slot_bytes_ / w;
  for (int64_t start = 0; start < count; start += room, x += room * w) {
    const int64_t n = std::min(room, count - start);
    copy(next(), x, n * w);
    post();
    wait();
    const auto [first, last] = two ? share(n, rank_, size_, kLine / w) : std::pair{int64_t{0}, n};
    for (int r = 0; r < size_; ++r) sources_[r] = at(peer(r), first * w);
    if (!two) {
      sum(element, x, sources_.data(), size_, n);
      continue;
    }
    sum(element, next(), sources_.data(), size_, last - first);
    post();
    wait();
    for (int r = 0; r < size_; ++r) {
      const auto [begin, end] = share(n, r, size_, kLine / w);
      copy(x + begin * w, peer(r), (end - begin) * w);
    }
  }
}

// Reduce-scatter, then all-gather, N - 1 steps each: in each step a rank hands one chunk to its right neighbour. A
// chunk is summed in the order of the ring from the rank after which it is named.
void ShmComm::all_reduce_ring(char* x, int64_t count, Element element) {
  const int64_t w = width(element), room = (slot_bytes_ / w) / (kLine / w) * (kLine / w) * size_;
  const int left = (rank_ + size_ - 1) % size_, right = (rank_ + 1) % size_;
  for (int64_t start = 0; start < count; start += room, x += room * w) {
    const int64_t n = std::min(room, count - start);
    for (int turn = 0; turn < 2 * (size_ - 1); ++turn) {
      const bool adding = turn < size_ - 1;
      const int hop = adding ? turn : turn - size_;  // all-gather starts with the chunk that was finished last
      const auto [out, out_end] = share(n, ((rank_ - hop) % size_ + size_) % size_, size_, kLine / w);
      const auto [in, in_end] = share(n, ((rank_ - hop - 1) % size_ + size_) % size_, size_, kLine / w);
      copy(next(), x + out * w, (out_end - out) * w);
      post();
      if (turn == 0) {
        wait();  // all may still have read the slot that the next step overwrites
      } else {
        wait_for(left);   // who fills this rank's chunk
        wait_for(right);  // who alone has read the slot that the next step overwrites
      }
      if (adding) {
        add(element, x + in * w, peer(left), in_end - in);
      } else {
        copy(x + in * w, peer(left), (in_end - in) * w);
      }
    }
  }
  next();
  post();
  wait();  // neighbours only have met so far; the next operation relies on all
}

void ShmComm::reduce_nodes(const float* nodes, const int32_t* counts, const Fold& fold, int64_t tokens,
                           int64_t columns, float* out, Algorithm algorithm) {
  Call call(*this, Op::kReduceNodes, tokens * counts[rank_] * columns * sizeof(float));
  const int64_t most = std::max(1, *std::max_element(counts, counts + size_));
  const int64_t floats = slot_bytes_ / sizeof(float), room = floats / (most * std::max<int64_t>(columns, 1));
  rows_.resize(2 * fold.rows);
  scratch_.resize(fold.rows * kFoldBlock);
  for (int64_t t = 0; t < tokens && room > 0; t += room) {
    nodes_piece(nodes + t * counts[rank_] * columns, counts, fold, std::min(room, tokens - t), columns, columns,
                out + t * columns, algorithm == Algorithm::kTwoShot);
  }
  // one token's nodes are larger than a slot: pieces of its columns
  for (int64_t t = 0; t < tokens && room == 0; ++t) {
    for (int64_t c = 0; c < columns; c += floats / most) {
      nodes_piece(nodes + t * counts[rank_] * columns + c, counts, fold, 1, std::min(floats / most, columns - c),
                  columns, out + t * columns + c, false);
    }
  }
}

// [tokens, own nodes, columns] out of rows of `stride` floats. A slot holds the piece without gaps.
void ShmComm::nodes_piece(const float* nodes, const int32_t* counts, const Fold& fold, int64_t tokens, int64_t columns,
                          int64_t stride, float* out, bool two) {
  float* own = static_cast<float*>(next());
  const int64_t rows = tokens * counts[rank_];
  if (stride == columns) {
    copy(own, nodes, rows * columns * sizeof(float));
  } else {
    for (int64_t i = 0; i < rows; ++i) copy(own + i * columns, nodes + i * stride, columns * sizeof(float));
  }
  post();
  wait();
  for (int r = 0; r < size_; ++r) sources_[r] = peer(r);
  const auto [first, last] = two ? share(tokens, rank_, size_, 1) : std::pair{int64_t{0}, tokens};
  float* folded = two ? static_cast<float*>(next()) : out;
  for (int64_t t = first; t < last; ++t, folded += two ? columns : stride) {
    int32_t node = 0;
    for (int r = 0; r < size_; ++r) {
      const float* row = static_cast<const float*>(sources_[r]) + t * counts[r] * columns;
      for (int32_t i = 0; i < counts[r]; ++i) rows_[node++] = row + i * columns;
    }
    fold_rows(fold, rows_.data(), folded, columns, scratch_.data(), rows_.data() + fold.rows);
  }
  if (!two) return;
  post();
  wait();
  for (int r = 0; r < size_; ++r) {
    const auto [begin, end] = share(tokens, r, size_, 1);
    copy(out + begin * columns, peer(r), (end - begin) * columns * sizeof(float));
  }
}

// A slot holds, for each rank, a piece of what goes to it: so every rank has something to add in every step.
void ShmComm::reduce_scatter(const void* x, const int64_t* counts, Element element, void* out) {
  const int64_t w = width(element), room = slot_bytes_ / size_ / kLine * kLine / w;
  Call call(*this, Op::kReduceScatter, total_of(counts, size_) * w);
  const int64_t most = *std::max_element(counts, counts + size_);
  for (int64_t start = 0; start < most; start += room) {
    void* own = next();
    int64_t part = 0;
    for (int r = 0; r < size_; part += counts[r++]) {
      const int64_t n = std::clamp<int64_t>(counts[r] - start, 0, room);
      copy(at(own, r * room * w), at(x, (part + start) * w), n * w);
    }
    post();
    wait();
    const int64_t n = std::clamp<int64_t>(counts[rank_] - start, 0, room);
    for (int r = 0; r < size_; ++r) sources_[r] = at(peer(r), rank_ * room * w);
    if (n > 0) sum(element, at(out, start * w), sources_.data(), size_, n);
  }
}

void ShmComm::all_gather(const void* x, int64_t rows, const int64_t* parts, void* out) {
  Call call(*this, Op::kAllGather, rows * parts[rank_]);
  gather_pieces(x, rows, parts, out);
}

void ShmComm::gather(const void* x, int64_t rows, const int64_t* parts, int root, void* out) {
  Call call(*this, Op::kGather, rows * parts[rank_]);
  gather_pieces(x, rows, parts, rank_ == root ? out : nullptr);
}

void ShmComm::gather_pieces(const void* x, int64_t rows, const int64_t* parts, void* out) {
  const int64_t room = slot_bytes_, stride = total_of(parts, size_);
  const int64_t most = rows * *std::max_element(parts, parts + size_);
  for (int64_t start = 0; start < most; start += room) {
    const auto end = [&](int r) { return std::clamp(rows * parts[r], start, start + room); };
    copy(next(), at(x, std::min(start, rows * parts[rank_])), end(rank_) - start);
    post();
    wait();
    for (int64_t r = 0, column = 0; r < size_ && out; column += parts[r++]) {
      scatter_rows(at(peer(r), 0), start, end(r), parts[r], at(out, column), stride);
    }
  }
}

void ShmComm::broadcast(void* x, size_t bytes, int root) {
  Call call(*this, Op::kBroadcast, rank_ == root ? bytes : 0);
  for (size_t start = 0; start < bytes; start += slot_bytes_) {
    const size_t n = std::min(slot_bytes_, bytes - start);
    void* own = next();
    if (rank_ == root) copy(own, at(x, start), n);
    post();
    wait();
    if (rank_ != root) copy(at(x, start), peer(root), n);
  }
}

void ShmComm::send(const void* x, size_t bytes, int to) {
  Call call(*this, Op::kSend, bytes);
  Mailbox& box = mailbox(rank_, to);
  size_t start = 0;
  do {  // an empty message is a chunk too
    const uint32_t index = box.written.load();
    wait_until(box.read, index - kChunks + 1, to);
    char* place = chunk(rank_, to, index);
    const size_t n = std::min(kChunkBody, bytes - start);
    std::memcpy(place, &bytes, sizeof bytes);
    copy(place + kChunkHead, at(x, start), n);
    tick();
    box.written.publish(index + 1);
    start += n;
  } while (start < bytes);
}

void ShmComm::recv(void* x, size_t bytes, int source) {
  Call call(*this, Op::kRecv, 0);
  Mailbox& box = mailbox(source, rank_);
  size_t start = 0;
  do {
    const uint32_t index = box.read.load();
    wait_until(box.written, index + 1, source);
    const char* place = chunk(source, rank_, index);
    size_t sent;
    std::memcpy(&sent, place, sizeof sent);
    if (sent != bytes) {
      segment_->abort(names_[source], what() + ": " + names({source}) + " sent " + std::to_string(sent) +
                                          " bytes where " + std::to_string(bytes) + " were expected");
    }
    const size_t n = std::min(kChunkBody, bytes - start);
    copy(at(x, start), place + kChunkHead, n);
    tick();
    box.read.publish(index + 1);
    start += n;
  } while (start < bytes);
}

void ShmComm::barrier() {
  Call call(*this, Op::kBarrier, 0);
  next();
  post();
  wait();
}

int ShmComm::agree_min(int value) {
  Call call(*this, Op::kAgree, sizeof value);
  *static_cast<int*>(next()) = value;
  post();
  wait();
  for (int r = 0; r < size_; ++r) value = std::min(value, *static_cast<const int*>(peer(r)));
  return value;
}

}  // namespace serried
