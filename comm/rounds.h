#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace smp::comm {

/// A part of an operation: some bytes to or from one rank of the group.
struct Message {
  enum class Direction { kSend, kReceive };
  Direction direction;
  int peer;
  void* data;  ///< Only read when sent.
  size_t bytes;
};

/// What is wrong when a message of `got` bytes comes for this receive.
std::string length_mismatch(const Message& receive, size_t got);

/// Messages that may move at the same time. When all have moved, `finish` (may be empty) runs on
/// whichever thread saw the last one; then the next round starts.
struct Round {
  std::vector<Message> messages;
  std::function<void()> finish;
};

// Every operation is a list of rounds, the same algorithm over every transport. The lists below
// refer to the tensors' memory; who runs them keeps the tensors alive.

/// Every rank owns a slice of the tensor, gets all ranks' values of it, reduces them in ascending
/// rank order, and then gives the result to all. Each rank sends and receives about twice the
/// tensor, whatever the number of ranks.
std::vector<Round> all_reduce_rounds(int rank, int size, const at::Tensor& tensor, ReduceOp op);

/// A binomial tree: ceil(log2(size)) steps from the root to the last rank.
std::vector<Round> broadcast_rounds(int rank, int size, const at::Tensor& tensor, int root);

/// Every rank sends its input to every other one.
std::vector<Round> all_gather_rounds(int rank, int size, const at::Tensor& output,
                                     const at::Tensor& input);

/// Dissemination: in round k, rank r tells r + 2^k and hears from r - 2^k.
std::vector<Round> barrier_rounds(int rank, int size);

}  // namespace smp::comm
