// SPDX-License-Identifier: Apache-2.0
#include "comm/device/ipc_collectives.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/device_streams.h"
#include "comm/nccl/reduce_parts.h"
#include "core/check.h"

namespace smp::comm {
namespace {

using Kind = Collective::Kind;
using Write = IpcBoard::Write;
using Read = IpcBoard::Read;

constexpr int64_t kRowAlignment = 256;  // more than any kernel asks for

// One collective in its turn. Tensors that are not reduced move as bytes; all counts are of
// elements, or of these.
class Move {
 public:
  Move(IpcBoard& board, CollectiveTurn& turn, const Collective& call, int rank, int size,
       int64_t one_step_bytes)
      : board_(board),
        turn_(turn),
        call_(call),
        rank_(rank),
        size_(size),
        one_step_bytes_(one_step_bytes),
        type_(call.reduces() ? call.uniform_tensor().scalar_type() : at::kByte),
        element_(static_cast<int64_t>(c10::elementSize(type_))) {
    if (call.reads(rank)) input_ = flat(call.input);
    if (call.writes(rank)) output_ = flat(call.output);
  }

  void run() {
    switch (call_.kind) {
      case Kind::kAllReduce:
        return all_reduce();
      case Kind::kReduce:
        return by_slices(flat(call_.input).numel(), [&](int64_t begin, int64_t count) {
          step(give(begin, count), [&] { take_sums(begin, count); });
        });
      case Kind::kBroadcast:
        return by_slices(flat(call_.input).numel(), [&](int64_t begin, int64_t count) {
          step(give(begin, count),
               [&] { output_.narrow(0, begin, count).copy_(read(call_.root, 0, count)); });
        });
      case Kind::kAllGather:
      case Kind::kGather:
        return gather();
      case Kind::kReduceScatter:
      case Kind::kScatter:
        return scatter();
      case Kind::kAllToAll:
        return all_to_all();
      default:
        SMP_INTERNAL_ASSERT(false, call_.name(), " has no tensor on the device");
    }
  }

 private:
  at::Tensor flat(const at::Tensor& tensor) const {
    const at::Tensor elements = tensor.view({-1});
    return call_.reduces() ? elements : elements.view(at::kByte);
  }

  at::Tensor in_slot(const at::Tensor& slot, int64_t first, int64_t count) const {
    return slot.narrow(0, first * element_, count * element_).view(type_);
  }

  at::Tensor read(int rank, int64_t first, int64_t count) const {
    return board_.read(rank, first * element_, count * element_).view(type_);
  }

  // A step of the call. Ranks that give nothing, or take nothing, leave this out.
  int64_t step(const Write& write, const Read& read) {
    return board_.step(turn_, call_, call_.reads(rank_) ? write : nullptr,
                       call_.writes(rank_) ? read : nullptr);
  }

  // Slices of `numel` elements; one at least, since ranks compare calls on no elements, too.
  template <class Slice>
  void by_slices(int64_t numel, const Slice& slice) const {
    const int64_t room = board_.slot_bytes() / element_;
    for (int64_t begin = 0; begin == 0 || begin < numel; begin += room) {
      slice(begin, std::min(room, numel - begin));
    }
  }

  Write give(int64_t begin, int64_t count) const {
    return [this, begin, count](const at::Tensor& slot) {
      in_slot(slot, 0, count).copy_(input_.narrow(0, begin, count));
    };
  }

  // The reduction of all ranks' elements from `first` on in their slots.
  at::Tensor sums(int64_t first, int64_t count) const {
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < size_; ++rank) {
      parts.push_back(read(rank, first, count));
    }
    return reduce_parts(parts, call_.op);
  }

  void take_sums(int64_t begin, int64_t count) const {
    output_.narrow(0, begin, count).copy_(sums(0, count));
  }

  void all_reduce() {
    by_slices(input_.numel(), [&](int64_t begin, int64_t count) {
      if (size_ == 2 || count * element_ <= one_step_bytes_) {
        step(give(begin, count), [&] { take_sums(begin, count); });
        return;
      }
      const int64_t share = (count + size_ - 1) / size_;
      const auto first = [&](int rank) { return std::min(count, rank * share); };
      const auto length = [&](int rank) { return first(rank + 1) - first(rank); };
      at::Tensor own;
      step(give(begin, count), [&] { own = sums(first(rank_), length(rank_)); });
      step([&](const at::Tensor& slot) { in_slot(slot, 0, length(rank_)).copy_(own); },
           [&] {
             for (int rank = 0; rank < size_; ++rank) {
               output_.narrow(0, begin + first(rank), length(rank))
                   .copy_(read(rank, 0, length(rank)));
             }
           });
    });
  }

  void gather() {
    const int64_t part = input_.numel();
    by_slices(part, [&](int64_t begin, int64_t count) {
      step(give(begin, count), [&] {
        for (int rank = 0; rank < size_; ++rank) {
          output_.narrow(0, rank * part + begin, count).copy_(read(rank, 0, count));
        }
      });
    });
  }

  // A slot has a row for each rank, of so many elements at most.
  int64_t row() const {
    return board_.slot_bytes() / size_ / kRowAlignment * kRowAlignment / element_;
  }

  void scatter() {
    const int64_t part = output_.numel();
    for (int64_t begin = 0; begin == 0 || begin < part; begin += row()) {
      const int64_t count = std::min(row(), part - begin);
      const auto give_rows = [&](const at::Tensor& slot) {
        in_slot(slot, 0, size_ * row())
            .view({size_, row()})
            .narrow(1, 0, count)
            .copy_(input_.view({size_, part}).narrow(1, begin, count));
      };
      step(give_rows, [&] {
        const int64_t first = rank_ * row();
        output_.narrow(0, begin, count)
            .copy_(call_.reduces() ? sums(first, count) : read(call_.root, first, count));
      });
    }
  }

  // Calls `move` for the elements of each rank's part from `begin` on that fit into a row: with the
  // rank, where they lie in the tensor, and how many they are.
  template <class MovePart>
  void for_parts(const std::vector<int64_t>& splits, int64_t begin, const MovePart& move) const {
    const int64_t bytes = static_cast<int64_t>(call_.uniform_tensor().element_size());
    int64_t offset = 0;
    for (int rank = 0; rank < size_; ++rank) {
      const int64_t length = splits[rank] * bytes;
      const int64_t count = std::clamp<int64_t>(length - begin, 0, row());
      if (count > 0) move(rank, offset + begin, count);
      offset += length;
    }
  }

  void all_to_all() {
    int64_t longest = 0;
    for (int64_t begin = 0; begin == 0 || begin < longest; begin += row()) {
      const auto give_rows = [&](const at::Tensor& slot) {
        for_parts(call_.input_splits, begin, [&](int rank, int64_t first, int64_t count) {
          in_slot(slot, rank * row(), count).copy_(input_.narrow(0, first, count));
        });
      };
      const int64_t split = step(give_rows, [&] {
        for_parts(call_.output_splits, begin, [&](int rank, int64_t first, int64_t count) {
          output_.narrow(0, first, count).copy_(read(rank, rank_ * row(), count));
        });
      });
      longest = split * static_cast<int64_t>(call_.uniform_tensor().element_size());
    }
  }

  IpcBoard& board_;
  CollectiveTurn& turn_;
  const Collective& call_;
  const int rank_, size_;
  const int64_t one_step_bytes_;
  const at::ScalarType type_;
  const int64_t element_;      // bytes
  at::Tensor input_, output_;  // flat; undefined where not read or not written
};

}  // namespace

// A collective or a task on the side stream.
struct IpcCollectives::Flight {
  explicit Flight(c10::DeviceType type) : ready(type), done(type) {}

  // Whether neither host nor device uses the tensors any more.
  bool has_ended() const {
    try {
      return has_run && done.query();
    } catch (const c10::Error&) {
      return true;  // the device has failed, and uses nothing
    }
  }

  c10::Event ready, done;
  Body body;  // keeps the tensors
  std::atomic<bool> has_run{false};
};

class IpcCollectives::FlightWork final : public Work {
 public:
  FlightWork(WorkPtr turn, std::shared_ptr<Flight> flight, at::Device device)
      : turn_(std::move(turn)), flight_(std::move(flight)), device_(device) {}

  bool test() override { return turn_->test() && flight_->done.query(); }

  // The tensors' memory goes back to the stream that waits here, after an error, too.
  void wait() override {
    run_finally([this] { turn_->wait(); },
                [this] {
                  flight_->done.block(current_stream(device_));
                  flight_->body = nullptr;
                });
  }

 private:
  const WorkPtr turn_;
  const std::shared_ptr<Flight> flight_;
  const at::Device device_;
};

IpcCollectives::IpcCollectives(const Communicator& host, at::Device device, DeviceIpc& ipc,
                               const SlotSizes& sizes)
    : group_(host.name()),
      rank_(host.rank()),
      size_(host.size()),
      device_(device),
      ipc_(ipc),
      sizes_(sizes) {}

Collective IpcCollectives::checked(const Collective& call) const {
  Collective valid = call;
  check_collective(valid, group_, rank_, size_, device_);
  return valid;
}

IpcCollectives::~IpcCollectives() {
  forget_ended();
  if (!flights_.empty()) new auto(std::move(flights_));
}

void IpcCollectives::forget_ended() {
  flights_.erase(std::remove_if(flights_.begin(), flights_.end(),
                                [](const auto& flight) { return flight->has_ended(); }),
                 flights_.end());
}

void IpcCollectives::run(Communicator& host, const Collective& call) {
  take_turn(host, on_stream(current_stream(device_),
                            [&, valid = checked(call)](auto& turn) { move(turn, valid); }));
}

WorkPtr IpcCollectives::start(Communicator& host, const Collective& call) {
  return on_side_stream(host,
                        [this, valid = checked(call)](CollectiveTurn& turn) { move(turn, valid); });
}

WorkPtr IpcCollectives::start(Communicator& host, const CollectiveTask& task) {
  return on_side_stream(host, [this, task](CollectiveTurn& turn) {
    TaskCollectives collectives([&](const Collective& call) { move(turn, checked(call)); });
    task(collectives);
  });
}

// On this thread or another, in the caller's mode.
IpcCollectives::Body IpcCollectives::on_stream(const c10::Stream& stream, Body body) const {
  return [stream, body = std::move(body),
          is_inference = c10::InferenceMode::is_enabled()](CollectiveTurn& turn) {
    const c10::InferenceMode as_caller(is_inference);
    const at::NoGradGuard no_grad;
    const c10::StreamGuard guard(stream);
    body(turn);
  };
}

WorkPtr IpcCollectives::on_side_stream(Communicator& host, Body body) {
  if (!side_) side_ = side_stream(device_);
  forget_ended();
  const auto flight = flights_.emplace_back(std::make_shared<Flight>(device_.type()));
  flight->body = on_stream(*side_, std::move(body));
  flight->ready.record(current_stream(device_));
  const auto run = [self = shared_from_this(), flight, side = *side_](CollectiveTurn& turn) {
    const auto give = [&] {
      flight->ready.block(side);
      flight->body(turn);
    };
    run_finally([&] { run_finally(give, [&] { flight->done.record(side); }); },
                [&] { flight->has_run = true; });
  };
  return std::make_shared<FlightWork>(start_turn(host, run), flight, device_);
}

bool IpcCollectives::is_idle() const {
  return std::all_of(flights_.begin(), flights_.end(),
                     [](const auto& flight) { return flight->has_ended(); }) &&
         (!small_ || small_->is_idle()) && (!large_ || large_->is_idle());
}

void IpcCollectives::move(CollectiveTurn& turn, const Collective& call) {
  SMP_CHECK_WITH(CommError, !has_failed_, call.name(), " on group '", group_,
                 "': an earlier collective of the group on tensors of ", device_,
                 " has failed, whose error says why. End the job, or go on with a new group.");
  has_failed_ = true;  // unless this ends: other ranks may be elsewhere
  Move(board_for(turn, call), turn, call, rank_, size_, sizes_.small).run();
  has_failed_ = false;
}

// All ranks take the same. Those of an all_to_all may not know how long others' parts are.
IpcBoard& IpcCollectives::board_for(CollectiveTurn& turn, const Collective& call) {
  const int64_t rows = call.kind == Kind::kReduceScatter || call.kind == Kind::kScatter ? size_ : 1;
  const auto bytes = static_cast<int64_t>(call.uniform_tensor().nbytes());
  const bool is_small = call.kind != Kind::kAllToAll && rows * bytes <= sizes_.small;
  auto& board = is_small ? small_ : large_;
  if (!board) {
    turn.meet(call);  // compares the calls before what they need
    board = std::make_unique<IpcBoard>(turn, ipc_, device_, rank_, size_,
                                       is_small ? sizes_.small : sizes_.large);
  }
  return *board;
}

}  // namespace smp::comm
