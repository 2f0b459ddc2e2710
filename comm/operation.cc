// SPDX-License-Identifier: Apache-2.0
#include "comm/operation.h"

#include <algorithm>
#include <numeric>
#include <string_view>
#include <utility>

#include "comm/exit_gate.h"
#include "core/check.h"
#include "core/failure.h"
#include "core/status.h"
#include "core/status_reader.h"
#include "core/wait_watch.h"

namespace smp::comm {
namespace {

using FailureKind = core::Failure::Kind;

constexpr std::chrono::milliseconds kLookForDeadline{100};

class OperationWork final : public ReceiveWork {
 public:
  OperationWork(std::shared_ptr<Transport> transport, std::shared_ptr<Operation> operation)
      : transport_(std::move(transport)), operation_(std::move(operation)) {}

  bool test() override {
    if (!ended()) {
      transport_->poll();
    }
    return ended();
  }

  void wait() override {
    wait_for(*transport_, *operation_, Deadline(operation_->group().timeout()));
  }

  int source() const override { return operation_->source(); }

 private:
  bool ended() const { return operation_->done() || transport_->aborted(); }

  const std::shared_ptr<Transport> transport_;
  const std::shared_ptr<Operation> operation_;
};

// "rank 3", "ranks 1, 3" or "any rank".
std::string text_of(const GroupState& group, const std::vector<int>& ranks) {
  if (ranks == std::vector<int>{kAnyRank}) {
    return "any rank";
  }
  return c10::str(ranks.size() == 1 ? "rank " : "ranks ", c10::Join(", ", group.in_world(ranks)));
}

template <class E>
class WaitError final : public E, public core::FailedWait {
 public:
  WaitError(const std::string& message, FailureKind kind, std::vector<int> missing,
            std::optional<core::StallCause> cause)
      : E(message), FailedWait(kind, std::move(missing), std::move(cause)) {}

  [[noreturn]] void throw_with(const std::string& text) const override {
    throw WaitError(E::what() + text, kind(), missing(), cause());
  }
};

// How a wait for `ranks` of the group has ended.
struct Ending {
  FailureKind kind;
  const GroupState& group;
  const std::vector<int> ranks;
  const std::optional<core::StallCause> cause = std::nullopt;
};

template <class E, class... Parts>
[[noreturn]] void fail(const Ending& ending, const Parts&... parts) {
  throw WaitError<E>(core::error_text(c10::str(parts...)), ending.kind,
                     missing_in_world(ending.group, ending.ranks), ending.cause);
}

// ", in call 3 of step function "train"": that of this thread, else of the rank that it works for.
std::string in_call() {
  std::string call = core::this_public_call().text();
  const core::Status* const status = core::this_status();
  if (call.empty() && status != nullptr) {
    call = status->call();
  }
  return call.empty() ? "" : ", in " + call;
}

}  // namespace

std::vector<int> missing_in_world(const GroupState& group, const std::vector<int>& missing) {
  const bool any = missing == std::vector<int>{kAnyRank};
  std::vector<int> result = any ? group.world_ranks : group.in_world(missing);
  result.erase(std::remove(result.begin(), result.end(), group.world_rank), result.end());
  return result;
}

std::vector<int> GroupState::in_world(const std::vector<int>& ranks) const {
  std::vector<int> result;
  for (const int rank : ranks) {
    result.push_back(world_ranks[rank]);
  }
  return result;
}

std::string describe(const GroupState& group, const OperationInfo& info) {
  const std::string where =
      c10::str(" on group '", group.name, "' (here rank ", group.world_rank, ")");
  if (info.peer == kNoRank) {
    return c10::str(info.verb, " of ", info.bytes, " bytes", where, ", collective number ",
                    info.tag - kMaxTag, in_call());
  }
  const bool sends = std::string_view(info.verb).find("send") != std::string_view::npos;
  return c10::str(info.verb, " of ", info.bytes, " bytes", sends ? " to " : " from ",
                  text_of(group, {info.peer}), " with tag ", info.tag, where, in_call());
}

void check_abort(const Transport& transport, const GroupState& group, const OperationInfo& info,
                 const std::vector<int>& missing) {
  if (transport.aborted()) {
    fail<CommError>(Ending{FailureKind::kHeard, group, missing}, transport.abort_text(),
                    " [noticed by ", describe(group, info), "]");
  }
}

void fail_timeout(const GroupState& group, const OperationInfo& info,
                  const std::vector<int>& missing) {
  const std::string remedy =
      info.peer == kNoRank
          ? " Check that these ranks call the same collectives of this group in the same order and "
            "have not failed; if they only compute for long, raise the time-out."
          : " Check that the peer posts the matching call with the same tag and group and has not "
            "failed; if it only computes for long, raise the time-out.";
  const core::WaitDiagnosis why = core::diagnose_wait();
  const std::string chain = why.chain.empty() ? "" : " The chain of waits: " + why.chain + ".";
  fail<TimeoutError>(Ending{FailureKind::kTimedOut, group, missing, why.cause},
                     describe(group, info), " was not complete within the timeout of ",
                     group.timeout().count() / 1000.0, " s; it waits for ", text_of(group, missing),
                     ".", chain, remedy);
}

void fail_ended(const GroupState& group, const OperationInfo& info, int rank) {
  try {
    fail<CommError>(Ending{FailureKind::kPeerEnded, group, {rank}}, describe(group, info),
                    " failed: the process of ", text_of(group, {rank}),
                    " has ended. Look at that rank's own output.");
  } catch (const CommError& error) {
    core::note_failed_wait(group.world_rank, error);
    throw;
  }
}

std::shared_ptr<GroupState> world_group(int rank, int size) {
  auto group = std::make_shared<GroupState>();
  group->name = "world";
  group->rank = rank;
  group->size = size;
  group->world_rank = rank;
  group->world_ranks.resize(size);
  std::iota(group->world_ranks.begin(), group->world_ranks.end(), 0);
  group->context = 0;
  return group;
}

const GroupState& PendingMessage::group() const { return operation->group(); }

std::string PendingMessage::length_mismatch(size_t got) const {
  return c10::str("expected a message of ", message.bytes, " bytes from ",
                  text_of(group(), {message.peer}), ", got one of ", got,
                  " bytes. Both sides must pass tensors of the same number of bytes.");
}

void PendingMessage::done(Transport& transport, const std::string& error) const {
  operation->transfer_done(transport, index, message.peer, error);
}

Operation::Operation(std::shared_ptr<const GroupState> group, OperationInfo info,
                     std::vector<Round> rounds, std::vector<at::Tensor> tensors)
    : group_(std::move(group)),
      info_(info),
      rounds_(std::move(rounds)),
      tensors_(std::move(tensors)) {}

// The last to hold it may be a thread of the transport.
Operation::~Operation() { let_go(std::move(tensors_)); }

void Operation::start(Transport& transport) { run(transport); }

// Starts rounds until one stays open. Only one thread at a time is in here: the one that started
// the operation or that ended the last transfer of the round before.
void Operation::run(Transport& transport) {
  while (round_ < rounds_.size()) {
    const std::vector<Message>& messages = rounds_[round_].messages;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      open_ = messages.size() + 1;  // the extra one keeps the round open until all have started
      is_open_.assign(messages.size(), true);
    }
    for (size_t i = 0; i < messages.size(); ++i) {
      transport.start({messages[i], info_.tag, shared_from_this(), i});
    }
    if (!close_one()) {
      return;
    }
    end_round();
  }
  finish(transport, "");
}

void Operation::transfer_done(Transport& transport, size_t index, int peer,
                              const std::string& error) {
  if (!error.empty()) {
    // The transfer stays open for ever, so no later round starts.
    finish(transport, " failed: " + error);
    return;
  }
  if (info_.peer != kNoRank) {
    source_ = peer;
  }
  const auto& check = rounds_[round_].check;
  std::string problem = check ? check(index) : "";
  if (!problem.empty()) {
    finish(transport, std::move(problem));
    return;
  }
  if (close_one(index)) {
    end_round();
    run(transport);
  }
}

// True when that was the last open transfer of the round.
bool Operation::close_one(std::optional<size_t> index) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (index) {
    is_open_[*index] = false;
  }
  return --open_ == 0;
}

void Operation::end_round() {
  if (rounds_[round_].finish) {
    rounds_[round_].finish();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  ++round_;
}

void Operation::finish(Transport& transport, std::string error) {
  if (error.empty()) {
    let_go(std::move(tensors_));  // their owner may wait for this before it ends
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (done()) {
      return;  // a second transfer of the round has failed
    }
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
  }
  transport.notify();
}

std::vector<int> Operation::open_peers() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> peers;
  for (size_t i = 0; i < is_open_.size(); ++i) {
    if (is_open_[i]) {
      peers.push_back(rounds_[round_].messages[i].peer);
    }
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

void wait_for(Transport& transport, const Operation& operation, const Deadline& deadline) {
  const auto ended = [&] { return operation.done() || transport.aborted(); };
  const bool has_waited = !ended();
  bool in_time = true;
  core::WaitWatch watch;
  while (in_time && !ended()) {  // the deadline may be brought forward meanwhile
    const Transport::Clock::time_point now = Transport::Clock::now();
    if (!transport.wait_until(std::min(deadline.get(), now + kLookForDeadline), ended)) {
      watch.look(operation.info().verb,
                 missing_in_world(operation.group(), operation.open_peers()));
    }
    in_time = Transport::Clock::now() < deadline.get();
  }
  const bool failed = operation.done() && !operation.error().empty();
  SMP_CHECK_WITH(CommError, !failed, describe(operation.group(), operation.info()),
                 operation.error());
  const std::vector<int> missing = has_waited ? operation.open_peers() : std::vector<int>();
  check_abort(transport, operation.group(), operation.info(), missing);
  if (!operation.done()) {
    fail_timeout(operation.group(), operation.info(), missing);
  }
}

ReceiveWorkPtr make_work(std::shared_ptr<Transport> transport,
                         std::shared_ptr<Operation> operation) {
  return std::make_shared<OperationWork>(std::move(transport), std::move(operation));
}

}  // namespace smp::comm
