#include "comm/shm/host_chain.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "comm/reduce.h"
#include "comm/shm/host_reduction.h"
#include "core/check.h"

namespace smp::comm {
namespace {

using Progress = HostBoard::Progress;

constexpr size_t kSmallest = 64 << 10;

// So many steps a piece may be on its way along the chain; the others need buffers, too: one is
// staged, one reduced and one taken.
constexpr uint32_t kLag = HostBoard::kBuffers - 3;

// One all_reduce by one rank.
class ChainReduction {
 public:
  struct Lane {
    Transport& transport;
    std::shared_ptr<const GroupState> group;
    const OperationInfo& info;
    const Deadline& deadline;
    int lanes;
    int previous;
    int next;
  };

  ChainReduction(const Collective& call, HostBoard& board, const Lane& lane)
      : call_(call),
        board_(board),
        lane_(lane),
        data_(static_cast<std::byte*>(call.output.mutable_data_ptr())),
        pieces_(even_slices(lane.lanes, call.output.nbytes())) {}

  void run() {
    const uint32_t steps = pieces_.steps();
    first_step_ = board_.take_steps(steps);
    sums_.resize(steps);
    results_.resize(steps);
    for (uint32_t i = 0; i < steps + 2 + kLag; ++i) {
      if (i < steps) {
        expect_partial(i);
        stage(i);
      }
      if (i >= 1 && i - 1 < steps) {
        reduce(i - 1);
      }
      if (i >= 1 + kLag && i - 1 - kLag < steps) {
        finish(i - 1 - kLag);
      }
      if (i >= 2 + kLag) {
        take(i - 2 - kLag);
      }
    }
    for (const auto& send : sends_) {
      wait_for(lane_.transport, *send, lane_.deadline);
    }
  }

 private:
  using OperationPtr = std::shared_ptr<Operation>;

  // Sums on their way, in the type in which they are added.
  struct Sums {
    std::vector<std::byte> bytes;
    OperationPtr receive;
  };

  bool is_first() const { return lane_.previous < 0; }
  bool is_last() const { return lane_.next < 0; }
  int me() const { return board_.rank(); }
  uint32_t step(uint32_t i) const { return first_step_ + i; }
  Slice own_piece(uint32_t i) const {
    return me() < pieces_.owners() ? pieces_.piece(me(), i) : Slice{};
  }
  size_t elements(const Slice& piece) const { return piece.bytes() / call_.output.element_size(); }
  std::byte* buffer(int rank, uint32_t i, int owner) const {
    return board_.buffer(rank, step(i)) + pieces_.offset(owner);
  }

  OperationPtr start(Message::Direction direction, int peer, void* data, size_t bytes) {
    const Message message{direction, peer, data, bytes};
    auto operation = std::make_shared<Operation>(lane_.group, lane_.info,
                                                 std::vector<Round>{{{message}, nullptr}},
                                                 std::vector<at::Tensor>{call_.output});
    operation->start(lane_.transport);
    return operation;
  }
  void send(int peer, const void* data, size_t bytes) {
    sends_.push_back(start(Message::Direction::kSend, peer, const_cast<void*>(data), bytes));
  }
  OperationPtr receive(int peer, void* data, size_t bytes) {
    return start(Message::Direction::kReceive, peer, data, bytes);
  }

  void expect_partial(uint32_t i) {
    const Slice own = own_piece(i);
    if (own.bytes() == 0) {
      return;
    }
    Sums& sums = sums_[i];
    sums.bytes.resize(elements(own) * accumulator_bytes(call_.output.scalar_type()));
    if (!is_first()) {
      sums.receive = receive(lane_.previous, sums.bytes.data(), sums.bytes.size());
    }
  }

  void stage(uint32_t i) {
    board_.await_all(Progress::kDone, step(i) - HostBoard::kBuffers);
    for (int owner = 0; owner < pieces_.owners(); ++owner) {
      const Slice piece = pieces_.piece(owner, i);
      if (owner != me() && piece.bytes() > 0) {
        std::memcpy(buffer(me(), i, owner), data_ + piece.begin, piece.bytes());
      }
    }
    board_.signal(Progress::kStaged, step(i));
  }

  // Adds this host's ranks to what has come, and sends the sums on.
  void reduce(uint32_t i) {
    const Slice own = own_piece(i);
    if (own.bytes() == 0) {
      return;
    }
    board_.await_all(Progress::kStaged, step(i));
    std::vector<const void*> parts;
    for (int rank = 0; rank < board_.ranks(); ++rank) {
      parts.push_back(rank == me() ? data_ + own.begin : buffer(rank, i, me()));
    }
    Sums& sums = sums_[i];
    if (!is_first()) {
      wait_for(lane_.transport, *sums.receive, lane_.deadline);
    }
    accumulate_in_order(sums.bytes.data(), !is_first(), parts, elements(own),
                        call_.output.scalar_type(), call_.op);
    if (is_last()) {
      finish_reduction(data_ + own.begin, sums.bytes.data(), elements(own),
                       call_.output.scalar_type(), call_.op, lane_.group->size);
    } else {
      send(lane_.next, sums.bytes.data(), sums.bytes.size());
      results_[i] = receive(lane_.next, data_ + own.begin, own.bytes());
    }
  }

  // When the result is there, sends it back and lets the others of this host take it.
  void finish(uint32_t i) {
    const Slice own = own_piece(i);
    if (own.bytes() > 0) {
      if (!is_last()) {
        wait_for(lane_.transport, *results_[i], lane_.deadline);
      }
      if (!is_first()) {
        send(lane_.previous, data_ + own.begin, own.bytes());
      }
      std::memcpy(buffer(me(), i, me()), data_ + own.begin, own.bytes());
    }
    board_.signal(Progress::kReduced, step(i));
  }

  void take(uint32_t i) {
    for (int owner = 0; owner < pieces_.owners(); ++owner) {
      const Slice piece = pieces_.piece(owner, i);
      if (owner != me() && piece.bytes() > 0) {
        board_.await(Progress::kReduced, step(i), owner);
        std::memcpy(data_ + piece.begin, buffer(owner, i, owner), piece.bytes());
      }
    }
    board_.signal(Progress::kDone, step(i));
  }

  const Collective& call_;
  HostBoard& board_;
  const Lane lane_;
  std::byte* const data_;
  const Pieces pieces_;
  uint32_t first_step_ = 0;

  std::vector<Sums> sums_;             // by step
  std::vector<OperationPtr> results_;  // by step
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

void HostChain::run(const Collective& call, const OperationInfo& info, const Deadline& deadline) {
  board_->begin(info, deadline);
  board_->next_card().call = signature_of(call);
  board_->show_card();
  board_->await_cards();
  board_->check_same_calls(info);
  ChainReduction(call, *board_, {*transport_, group_, info, deadline, lanes_, previous_, next_})
      .run();
}

}  // namespace smp::comm
