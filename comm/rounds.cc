// SPDX-License-Identifier: Apache-2.0
#include "comm/rounds.h"

#include <c10/util/StringUtil.h>

#include <cstring>
#include <memory>
#include <set>
#include <utility>

#include "comm/reduce.h"
#include "comm/slices.h"
#include "core/check.h"

namespace smp::comm {
namespace {

Message send_to(int peer, const void* data, size_t bytes) {
  return {Message::Direction::kSend, peer, const_cast<void*>(data), bytes};
}

Message receive_from(int peer, void* data, size_t bytes) {
  return {Message::Direction::kReceive, peer, data, bytes};
}

// A part of the input to each other rank, and one of the output from each. Those without a byte are
// not sent; both ends know which.
Round exchange_round(int rank, const std::byte* input, const Slices& sends, std::byte* output,
                     const Slices& receives) {
  Round round;
  for (int peer = 0; peer < static_cast<int>(sends.size()); ++peer) {
    const Slice sent = sends[peer], received = receives[peer];
    if (peer != rank && received.bytes() > 0) {
      round.messages.push_back(receive_from(peer, output + received.begin, received.bytes()));
    }
    if (peer != rank && sent.bytes() > 0) {
      round.messages.push_back(send_to(peer, input + sent.begin, sent.bytes()));
    }
  }
  return round;
}

// My values of each slice go to its owner; all ranks' values of mine come into a scratch buffer and
// are reduced into `result`.
Round reduce_own_slice(const Collective& call, int rank, const Slices& slices, std::byte* result) {
  const auto* data = static_cast<const std::byte*>(call.input.const_data_ptr());
  const int size = static_cast<int>(slices.size());
  const size_t bytes = slices[rank].bytes();
  std::shared_ptr<std::byte[]> scratch(new std::byte[bytes * (size - 1)]);
  Slices receives(size);
  std::vector<const void*> parts(size);
  size_t next = 0;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) {
      parts[peer] = data + slices[rank].begin;
      continue;
    }
    receives[peer] = {next, next + bytes};
    parts[peer] = scratch.get() + next;
    next += bytes;
  }
  Round round = exchange_round(rank, data, slices, scratch.get(), receives);
  const size_t elements = bytes / call.input.element_size();
  round.finish = [scratch, parts, result, elements, dtype = call.input.scalar_type(),
                  op = call.op] {
    if (elements > 0) {
      reduce_in_order({result}, parts, elements, dtype, op, static_cast<int>(parts.size()));
    }
  };
  return round;
}

std::vector<Round> all_reduce_rounds(const Collective& call, int rank, int size) {
  auto* data = static_cast<std::byte*>(call.output.mutable_data_ptr());
  const Slices slices = even_slices(size, call.output.nbytes());
  // Then the owner of each slice gives it to everyone.
  return {reduce_own_slice(call, rank, slices, data + slices[rank].begin),
          exchange_round(rank, data, Slices(size, slices[rank]), data, slices)};
}

// Only the root's tensor may change, so the others reduce into memory of their own.
std::vector<Round> reduce_rounds(const Collective& call, int rank, int size) {
  auto* data = static_cast<std::byte*>(call.output.mutable_data_ptr());
  const Slices slices = even_slices(size, call.output.nbytes());
  if (rank == call.root) {
    return {reduce_own_slice(call, rank, slices, data + slices[rank].begin),
            exchange_round(rank, nullptr, Slices(size), data, slices)};
  }
  const size_t bytes = slices[rank].bytes();
  std::shared_ptr<std::byte[]> result(new std::byte[bytes]);
  std::vector<Round> rounds{reduce_own_slice(call, rank, slices, result.get())};
  if (bytes > 0) {
    rounds.push_back({{send_to(call.root, result.get(), bytes)}, [result] {}});
  }
  return rounds;
}

std::vector<Round> reduce_scatter_rounds(const Collective& call, int rank, int size) {
  auto* result = static_cast<std::byte*>(call.output.mutable_data_ptr());
  return {reduce_own_slice(call, rank, equal_slices(size, call.output.nbytes()), result)};
}

std::vector<Round> broadcast_rounds(const Collective& call, int rank, int size) {
  void* data = call.output.mutable_data_ptr();
  const size_t bytes = call.output.nbytes();
  const int relative = (rank - call.root + size) % size;  // the root is 0 in the tree
  const auto absolute = [&](int r) { return (r + call.root) % size; };
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

Slices slices_of(const std::vector<int64_t>& splits, size_t element_bytes) {
  Slices slices;
  size_t begin = 0;
  for (const int64_t split : splits) {
    const size_t end = begin + static_cast<size_t>(split) * element_bytes;
    slices.push_back({begin, end});
    begin = end;
  }
  return slices;
}

// Where the part for, or from, each rank lies; no slices where this rank sends, or gets, nothing.
struct Exchange {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  Slices sends;
  Slices receives;
};

Exchange exchange_of(const Collective& call, int rank, int size) {
  Exchange exchange;
  if (call.reads(rank)) {
    exchange.input = static_cast<const std::byte*>(call.input.const_data_ptr());
  }
  if (call.writes(rank)) {
    exchange.output = static_cast<std::byte*>(call.output.mutable_data_ptr());
  }
  switch (call.kind) {
    case Collective::Kind::kAllToAll:
      exchange.sends = slices_of(call.input_splits, call.input.element_size());
      exchange.receives = slices_of(call.output_splits, call.output.element_size());
      break;
    case Collective::Kind::kAllGather:
      exchange.sends = Slices(size, {0, call.input.nbytes()});
      exchange.receives = equal_slices(size, call.input.nbytes());
      break;
    case Collective::Kind::kGather:
      exchange.sends = Slices(size);
      exchange.sends[call.root] = {0, call.input.nbytes()};
      exchange.receives =
          rank == call.root ? equal_slices(size, call.input.nbytes()) : Slices(size);
      break;
    case Collective::Kind::kScatter:
      exchange.sends = rank == call.root ? equal_slices(size, call.output.nbytes()) : Slices(size);
      exchange.receives = Slices(size);
      exchange.receives[call.root] = {0, call.output.nbytes()};
      break;
    default:
      SMP_INTERNAL_ASSERT(false, call.name());
  }
  return exchange;
}

std::vector<Round> exchange_rounds(const Collective& call, int rank, int size) {
  const auto [input, output, sends, receives] = exchange_of(call, rank, size);
  const Slice from = sends[rank];
  std::byte* const to = output + receives[rank].begin;
  if (from.bytes() > 0 && to != input + from.begin) {
    std::memcpy(to, input + from.begin, from.bytes());
  }
  return {exchange_round(rank, input, sends, output, receives)};
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

// The peers of all messages of one direction, each once.
std::vector<int> peers_of(const std::vector<Round>& rounds, Message::Direction direction) {
  std::set<int> peers;
  for (const Round& round : rounds) {
    for (const Message& message : round.messages) {
      if (message.direction == direction) {
        peers.insert(message.peer);
      }
    }
  }
  return {peers.begin(), peers.end()};
}

}  // namespace

std::vector<Round> rounds_of(const Collective& call, int rank, int size) {
  switch (call.kind) {
    case Collective::Kind::kAllReduce:
      return size == 1 ? std::vector<Round>() : all_reduce_rounds(call, rank, size);
    case Collective::Kind::kReduce:
      return size == 1 ? std::vector<Round>() : reduce_rounds(call, rank, size);
    case Collective::Kind::kReduceScatter:
      return reduce_scatter_rounds(call, rank, size);
    case Collective::Kind::kBroadcast:
      return broadcast_rounds(call, rank, size);
    case Collective::Kind::kBarrier:
      return barrier_rounds(rank, size);
    default:
      return exchange_rounds(call, rank, size);
  }
}

struct CallExchange::Memory {
  Call own;
  int rank;
  std::vector<int> world_ranks;
  std::vector<Call> heard;  // calls by rank
};

CallExchange::CallExchange(const Call& own, int rank, const std::vector<int>& world_ranks)
    : memory_(std::make_shared<Memory>(
          Memory{own, rank, world_ranks, std::vector<Call>(world_ranks.size())})) {}

Round CallExchange::round(const std::vector<int>& to, const std::vector<int>& from) const {
  Round round;
  for (const int peer : from) {
    round.messages.push_back(receive_from(peer, &memory_->heard[peer], sizeof(Call)));
  }
  for (const int peer : to) {
    round.messages.push_back(send_to(peer, &memory_->own, sizeof(Call)));
  }
  round.check = [memory = memory_, from](size_t message) -> std::string {
    if (message >= from.size()) {
      return "";
    }
    const int peer = from[message];
    std::vector<int> ranks{memory->world_ranks[memory->rank], memory->world_ranks[peer]};
    std::vector<Call> calls{memory->own, memory->heard[peer]};
    if (peer < memory->rank) {
      std::swap(ranks[0], ranks[1]);
      std::swap(calls[0], calls[1]);
    }
    const std::string text = mismatch_text(ranks, calls);
    return text.empty() ? "" : " does not match the other ranks' calls: " + text;
  };
  return round;
}

std::vector<Round> CallExchange::before(std::vector<Round> rounds) const {
  Round calls = round(peers_of(rounds, Message::Direction::kSend),
                      peers_of(rounds, Message::Direction::kReceive));
  if (calls.messages.empty()) {
    return rounds;
  }
  std::vector<Message>& messages = rounds.front().messages;
  messages.insert(messages.begin(), calls.messages.begin(), calls.messages.end());
  rounds.front().check = std::move(calls.check);
  return rounds;
}

}  // namespace smp::comm
