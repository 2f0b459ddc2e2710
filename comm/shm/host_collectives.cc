// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/host_collectives.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
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
constexpr size_t kZeroCopyBytes = 4 << 10;

// Keeps calls that this rank has given up: another thread may still read and write them, however
// late it comes.
void keep_to_the_end(const Collective& call) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<Collective>;
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(call);
}

}  // namespace

void HostCollectives::run(const Collective& call, const OperationInfo& info,
                          const Deadline& deadline) {
  board_->begin(info, deadline);
  publish(call);
  keeping(call, [&] { board_->await_records(); });
  check_calls(call, info);
  if (call.kind != Kind::kBarrier) {
    keeping(call, [&] { move(call); });
  }
}

int64_t HostCollectives::meet(const Collective& call, const OperationInfo& info,
                              const Deadline& deadline) {
  board_->begin(info, deadline);
  begin_record(call);
  board_->publish_record();
  board_->await_records();
  check_calls(call, info);
  int64_t longest = 0;
  for (int rank = 0; call.kind == Kind::kAllToAll && rank < board_->ranks(); ++rank) {
    const int64_t* const splits = board_->splits(rank);
    longest = std::max(longest, *std::max_element(splits, splits + board_->ranks()));
  }
  return longest;
}

template <class Wait>
void HostCollectives::keeping(const Collective& call, const Wait& wait) const {
  try {
    wait();
  } catch (const std::exception&) {
    if (in_one_process_) {
      keep_to_the_end(call);
    }
    throw;
  }
}

void HostCollectives::move(const Collective& call) {
  const Protocol protocol = all_eager()    ? Protocol::kEager
                            : all_mapped() ? Protocol::kZeroCopy
                                           : Protocol::kPipelined;
  if (call.reduces()) {
    HostReduction(call, *board_).run(protocol);
  } else {
    HostExchange(call, *board_).run(protocol);
  }
}

// Fills in all that the ranks compare.
CallRecord& HostCollectives::begin_record(const Collective& call) {
  CallRecord& record = board_->next_record(signature_of(call));
  if (call.kind == Kind::kAllToAll) {
    int64_t* const splits = board_->splits(board_->rank());
    std::copy(call.input_splits.begin(), call.input_splits.end(), splits);
    std::copy(call.output_splits.begin(), call.output_splits.end(), splits + board_->ranks());
  }
  return record;
}

void HostCollectives::publish(const Collective& call) {
  CallRecord& record = begin_record(call);
  if (call.kind != Kind::kBarrier) {
    const bool reads = call.reads(board_->rank());
    record.place = place(reads ? call.input : call.output);
    record.input_bytes = reads ? call.input.nbytes() : 0;
    const size_t at_most = record.place.space == 0 ? HostBoard::kEagerBytes : kZeroCopyBytes;
    record.is_eager = record.input_bytes <= at_most;
    if (record.is_eager && record.input_bytes > 0) {
      std::memcpy(board_->eager_data(board_->rank()), call.input.const_data_ptr(),
                  record.input_bytes);
    }
  }
  board_->publish_record();
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
      SMP_CHECK_WITH(CommError, sent == expected, board_->describe(info), ": rank ",
                     board_->world_rank(from), " sends ", sent, " elements to rank ",
                     board_->world_rank(to), ", which expects ", expected,
                     ". The input split of the one must be the output split of the other.");
    }
  }
}

bool HostCollectives::all_eager() const {
  for (int rank = 0; rank < board_->ranks(); ++rank) {
    if (!board_->record(rank).is_eager) {
      return false;
    }
  }
  return true;
}

// Whether every rank's tensor lies in one memory, which then every rank maps.
bool HostCollectives::all_mapped() const {
  const uint64_t space = board_->record(0).place.space;
  for (int rank = 0; rank < board_->ranks(); ++rank) {
    if (board_->record(rank).place.space != space) {
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
