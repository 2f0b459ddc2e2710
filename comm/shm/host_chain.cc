// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/host_chain.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "comm/reduce.h"
#include "comm/shm/host_chunks.h"
#include "core/check.h"

namespace smp::comm {
namespace {

constexpr size_t kSmallest = 64 << 10;

// So many steps a chunk may be on its way along the chain; the others need buffers, too: one is
// staged, one reduced and one taken.
constexpr uint64_t kLag = HostBoard::kBuffers - 3;

// The path of this rank's slice from host to host.
struct Lane {
  Transport& transport;
  std::shared_ptr<const GroupState> group;
  const OperationInfo& info;
  const Deadline& deadline;
  int lanes;
  int previous;  // the ranks of the group at its other ends; -1 where there is none
  int next;

  bool is_first() const { return previous < 0; }
  bool is_last() const { return next < 0; }
  std::vector<int> ends() const {
    std::vector<int> ranks;
    for (const int rank : {previous, next}) {
      if (rank >= 0) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  }
};

// One all_reduce by one rank.
class ChainReduction {
 public:
  ChainReduction(const Collective& call, const CallExchange& calls, HostBoard& board,
                 const Lane& lane)
      : call_(call),
        lane_(lane),
        data_(static_cast<std::byte*>(call.output.mutable_data_ptr())),
        chunks_(board, even_slices(lane.lanes, call.output.nbytes())),
        sums_(new std::byte[sums_begin(chunks_.steps())]),
        calls_(start(calls.round(lane.ends(), lane.ends()))),
        partial_sums_(chunks_.steps()),
        results_(chunks_.steps()) {}

  void run() {
    const uint64_t steps = chunks_.steps();
    for (uint64_t i = 0; i < steps + 2 + kLag; ++i) {
      if (i < steps) {
        expect_partial_sums(i);
        chunks_.stage(i, data_);
      }
      if (i >= 1 && i - 1 < steps) {
        reduce(i - 1);
      }
      if (i >= 1 + kLag && i - 1 - kLag < steps) {
        finish(i - 1 - kLag);
      }
      if (i >= 2 + kLag) {
        chunks_.take(i - 2 - kLag, data_);
      }
    }
    for (const auto& send : sends_) {
      wait_for(lane_.transport, *send, lane_.deadline);
    }
  }

 private:
  using OperationPtr = std::shared_ptr<Operation>;

  size_t elements(const Slice& chunk) const { return chunk.bytes() / call_.output.element_size(); }
  size_t sums_bytes(const Slice& chunk) const {
    return elements(chunk) * accumulator_bytes(call_.output.scalar_type());
  }
  // Where the sums of step `i` begin: behind those of the steps before.
  size_t sums_begin(uint64_t i) const {
    const size_t before = i == 0 ? 0 : chunks_.own_chunk(i - 1).end - chunks_.own_chunk(0).begin;
    return sums_bytes({0, before});
  }

  // Peers may read and write the tensors of an operation after this rank has thrown, so the
  // operation holds the sums and, by its tensor, the results.
  OperationPtr start(Round round) {
    auto operation =
        std::make_shared<Operation>(lane_.group, lane_.info, std::vector<Round>{std::move(round)},
                                    std::vector<at::Tensor>{call_.output});
    operation->start(lane_.transport);
    return operation;
  }
  OperationPtr start(Message::Direction direction, int peer, void* data, size_t bytes) {
    return start({{{direction, peer, data, bytes}}, [sums = sums_] {}});
  }
  void send(int peer, void* data, size_t bytes) {
    sends_.push_back(start(Message::Direction::kSend, peer, data, bytes));
  }
  OperationPtr receive(int peer, void* data, size_t bytes) {
    return start(Message::Direction::kReceive, peer, data, bytes);
  }
  // Values on the lane have the expected meaning only if the calls match.
  void await_chunk(const OperationPtr& operation) const {
    for (const auto& one : {calls_, operation}) {
      wait_for(lane_.transport, *one, lane_.deadline);
    }
  }

  void expect_partial_sums(uint64_t i) {
    const Slice own = chunks_.own_chunk(i);
    if (own.bytes() > 0 && !lane_.is_first()) {
      partial_sums_[i] = receive(lane_.previous, sums_.get() + sums_begin(i), sums_bytes(own));
    }
  }

  // Adds this host's ranks to the received sums, and sends these on.
  void reduce(uint64_t i) {
    const Slice own = chunks_.own_chunk(i);
    if (own.bytes() == 0) {
      return;
    }
    const std::vector<const void*> parts = chunks_.parts(i, data_);
    std::byte* const sums = sums_.get() + sums_begin(i);
    const c10::ScalarType dtype = call_.output.scalar_type();
    if (!lane_.is_first()) {
      await_chunk(partial_sums_[i]);
    }
    accumulate_in_order(sums, !lane_.is_first(), parts, elements(own), dtype, call_.op);
    if (lane_.is_last()) {
      finish_reduction(data_ + own.begin, sums, elements(own), dtype, call_.op, lane_.group->size);
    } else {
      send(lane_.next, sums, sums_bytes(own));
      results_[i] = receive(lane_.next, data_ + own.begin, own.bytes());
    }
  }

  // When the result is there, sends it back and lets the others of this host take it.
  void finish(uint64_t i) {
    const Slice own = chunks_.own_chunk(i);
    if (own.bytes() > 0) {
      if (!lane_.is_last()) {
        await_chunk(results_[i]);
      }
      if (!lane_.is_first()) {
        send(lane_.previous, data_ + own.begin, own.bytes());
      }
      std::memcpy(chunks_.own_result(i), data_ + own.begin, own.bytes());
    }
    chunks_.publish(i);
  }

  const Collective& call_;
  const Lane lane_;
  std::byte* const data_;
  const HostChunks chunks_;

  const std::shared_ptr<std::byte[]> sums_;  // this rank's slice, in accumulators' type
  const OperationPtr calls_;
  std::vector<OperationPtr> partial_sums_;  // receives, by step
  std::vector<OperationPtr> results_;       // receives, by step
  std::vector<OperationPtr> sends_;
};

}  // namespace

HostChain::HostChain(std::shared_ptr<Transport> transport, std::shared_ptr<const GroupState> group,
                     const HostLayout& layout, std::unique_ptr<HostBoard> board)
    : transport_(std::move(transport)),
      group_(std::move(group)),
      board_(std::move(board)),
      lanes_(layout.local_size()) {
  for (const std::vector<int>& ranks : layout.hosts) {
    lanes_ = std::min(lanes_, static_cast<int>(ranks.size()));
  }
  if (layout.local_rank < lanes_) {
    const int last = static_cast<int>(layout.hosts.size()) - 1;
    previous_ = layout.host == 0 ? -1 : layout.hosts[layout.host - 1][layout.local_rank];
    next_ = layout.host == last ? -1 : layout.hosts[layout.host + 1][layout.local_rank];
  }
}

bool HostChain::takes(const Collective& call) const {
  return call.kind == Collective::Kind::kAllReduce && call.output.nbytes() >= kSmallest;
}

void HostChain::run(const Collective& call, const CallExchange& calls, const OperationInfo& info,
                    const Deadline& deadline) {
  board_->begin(info, deadline);
  board_->next_record(signature_of(call));
  board_->publish_record();
  board_->await_records();
  board_->check_same_calls(info);
  const Lane lane{*transport_, group_, info, deadline, lanes_, previous_, next_};
  ChainReduction(call, calls, *board_, lane).run();
}

}  // namespace smp::comm
