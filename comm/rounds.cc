#include "comm/rounds.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "comm/reduce.h"

namespace smp::comm {
namespace {

constexpr size_t kAlignment = 64;  // bytes: slices start on cache lines of the tensor

Message send_to(int peer, const void* data, size_t bytes) {
  return {Message::Direction::kSend, peer, const_cast<void*>(data), bytes};
}

Message receive_from(int peer, void* data, size_t bytes) {
  return {Message::Direction::kReceive, peer, data, bytes};
}

// The bytes [begin, end) of a tensor that one rank reduces; the last ranks' may be empty.
struct Slice {
  size_t begin;
  size_t end;
  size_t bytes() const { return end - begin; }
};

Slice slice_of(int rank, int size, size_t bytes) {
  const size_t even = (bytes + size - 1) / size;
  const size_t chunk = (even + kAlignment - 1) / kAlignment * kAlignment;
  return {std::min(bytes, rank * chunk), std::min(bytes, (rank + 1) * chunk)};
}

// Round 1 of all_reduce: my values of each slice go to its owner; all ranks' values of mine come
// into a scratch buffer and are reduced into the tensor.
Round reduce_own_slice(int rank, int size, std::byte* data, size_t bytes, c10::ScalarType dtype,
                       ReduceOp op) {
  const Slice own = slice_of(rank, size, bytes);
  std::shared_ptr<std::byte[]> scratch(new std::byte[own.bytes() * (size - 1)]);
  Round round;
  std::vector<const void*> parts(size);
  std::byte* next = scratch.get();
  for (int peer = 0; peer < size; ++peer) {
    const Slice theirs = slice_of(peer, size, bytes);
    if (peer == rank) {
      parts[peer] = data + own.begin;
      continue;
    }
    if (own.bytes() > 0) {
      parts[peer] = next;
      round.messages.push_back(receive_from(peer, next, own.bytes()));
      next += own.bytes();
    }
    if (theirs.bytes() > 0) {
      round.messages.push_back(send_to(peer, data + theirs.begin, theirs.bytes()));
    }
  }
  round.finish = [scratch, parts, data, own, dtype, op] {
    if (own.bytes() > 0) {
      reduce_in_order(data + own.begin, parts, own.bytes() / c10::elementSize(dtype), dtype, op);
    }
  };
  return round;
}

// Round 2 of all_reduce: the owner of each slice gives it to everyone.
Round share_slices(int rank, int size, std::byte* data, size_t bytes) {
  const Slice own = slice_of(rank, size, bytes);
  Round round;
  for (int peer = 0; peer < size; ++peer) {
    const Slice theirs = slice_of(peer, size, bytes);
    if (peer == rank) {
      continue;
    }
    if (theirs.bytes() > 0) {
      round.messages.push_back(receive_from(peer, data + theirs.begin, theirs.bytes()));
    }
    if (own.bytes() > 0) {
      round.messages.push_back(send_to(peer, data + own.begin, own.bytes()));
    }
  }
  return round;
}

}  // namespace

std::string length_mismatch(const Message& receive, size_t got) {
  return c10::str("expected a message of ", receive.bytes, " bytes from rank ", receive.peer,
                  ", got one of ", got,
                  " bytes. Both sides must pass tensors of the same number of bytes.");
}

std::vector<Round> all_reduce_rounds(int rank, int size, const at::Tensor& tensor, ReduceOp op) {
  if (size == 1 || tensor.nbytes() == 0) {
    return {};
  }
  auto* data = static_cast<std::byte*>(tensor.mutable_data_ptr());
  std::vector<Round> rounds;
  rounds.push_back(reduce_own_slice(rank, size, data, tensor.nbytes(), tensor.scalar_type(), op));
  rounds.push_back(share_slices(rank, size, data, tensor.nbytes()));
  return rounds;
}

std::vector<Round> broadcast_rounds(int rank, int size, const at::Tensor& tensor, int root) {
  void* data = tensor.mutable_data_ptr();
  const size_t bytes = tensor.nbytes();
  const int relative = (rank - root + size) % size;  // the root is 0 in the tree
  const auto absolute = [&](int r) { return (r + root) % size; };
  std::vector<Round> rounds;
  int step = 1;
  while (step < size && (relative & step) == 0) {
    step *= 2;
  }
  if (relative != 0) {
    rounds.push_back({{receive_from(absolute(relative - step), data, bytes)}, nullptr});
  }
  Round to_children;
  for (step /= 2; step > 0; step /= 2) {
    if (relative + step < size) {
      to_children.messages.push_back(send_to(absolute(relative + step), data, bytes));
    }
  }
  rounds.push_back(std::move(to_children));
  return rounds;
}

std::vector<Round> all_gather_rounds(int rank, int size, const at::Tensor& output,
                                     const at::Tensor& input) {
  auto* out = static_cast<std::byte*>(output.mutable_data_ptr());
  const size_t bytes = input.nbytes();
  if (bytes > 0 && out + rank * bytes != input.const_data_ptr()) {
    std::memcpy(out + rank * bytes, input.const_data_ptr(), bytes);
  }
  Round round;
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) {
      round.messages.push_back(receive_from(peer, out + peer * bytes, bytes));
      round.messages.push_back(send_to(peer, input.const_data_ptr(), bytes));
    }
  }
  return {std::move(round)};
}

std::vector<Round> barrier_rounds(int rank, int size) {
  std::vector<Round> rounds;
  for (int distance = 1; distance < size; distance *= 2) {
    const int to = (rank + distance) % size;
    const int from = (rank - distance + size) % size;
    rounds.push_back({{send_to(to, nullptr, 0), receive_from(from, nullptr, 0)}, nullptr});
  }
  return rounds;
}

}  // namespace smp::comm
