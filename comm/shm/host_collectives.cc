#include "comm/shm/host_collectives.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "comm/reduce.h"
#include "comm/shm/host_exchange.h"
#include "comm/shm/host_reduction.h"
#include "core/check.h"

namespace smp::comm {
namespace {

using Kind = Collective::Kind;

// From here on it is faster to read others' tensors, where they can be seen, than copies of them.
constexpr size_t kDirectBytes = 4 << 10;

}  // namespace

void HostCollectives::run(const Collective& call, const OperationInfo& info,
                          const Deadline& deadline) {
  board_->begin(info, deadline);
  show(call);
  board_->await_cards();
  check_calls(call, info);
  if (call.kind == Kind::kBarrier) {
    return;
  }
  const Way way = all_small() ? Way::kSmall : all_visible() ? Way::kDirect : Way::kBuffers;
  if (call.reduces()) {
    HostReduction(call, *board_).run(way);
  } else {
    HostExchange(call, *board_).run(way);
  }
}

void HostCollectives::show(const Collective& call) {
  Card& card = board_->next_card();
  card.call = signature_of(call);
  if (call.kind != Kind::kBarrier) {
    const bool reads = call.reads(board_->rank());
    card.place = place(reads ? call.input : call.output);
    card.source_bytes = reads ? call.input.nbytes() : 0;
    const size_t at_most = card.place.space == 0 ? HostBoard::kSmallBytes : kDirectBytes;
    card.is_beside = card.source_bytes <= at_most;
    if (card.is_beside && card.source_bytes > 0) {
      std::memcpy(board_->small(board_->rank()), call.input.const_data_ptr(), card.source_bytes);
    }
  }
  if (call.kind == Kind::kAllToAll) {
    int64_t* const splits = board_->splits(board_->rank());
    std::copy(call.input_splits.begin(), call.input_splits.end(), splits);
    std::copy(call.output_splits.begin(), call.output_splits.end(), splits + board_->ranks());
  }
  board_->show_card();
}

// All ranks see the same splits, so that all throw or none.
void HostCollectives::check_calls(const Collective& call, const OperationInfo& info) const {
  board_->check_same_calls(info);
  if (call.kind != Kind::kAllToAll) {
    return;
  }
  const int ranks = board_->ranks();
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      const int64_t sent = board_->splits(from)[to];
      const int64_t expected = board_->splits(to)[ranks + from];
      SMP_CHECK_WITH(CommError, sent == expected, board_->describe(info), ": rank ", from,
                     " sends ", sent, " elements to rank ", to, ", which expects ", expected,
                     ". The input split of the one must be the output split of the other.");
    }
  }
}

bool HostCollectives::all_small() const {
  for (int rank = 0; rank < board_->ranks(); ++rank) {
    if (!board_->card(rank).is_beside) {
      return false;
    }
  }
  return true;
}

// Whether every rank's tensor lies in one memory, which then every rank maps.
bool HostCollectives::all_visible() const {
  const uint64_t space = board_->card(0).place.space;
  for (int rank = 0; rank < board_->ranks(); ++rank) {
    if (board_->card(rank).place.space != space) {
      return false;
    }
  }
  return space != 0;
}

Place HostCollectives::place(const at::Tensor& tensor) const {
  const void* const data = tensor.const_data_ptr();
  if (in_one_process_) {
    return {kThisProcess, reinterpret_cast<uint64_t>(data)};
  }
  return place_of(data, tensor.nbytes());
}

}  // namespace smp::comm
