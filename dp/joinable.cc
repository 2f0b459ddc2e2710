// SPDX-License-Identifier: Apache-2.0
#include "dp/joinable.h"

#include <ATen/ops/empty.h>

#include <exception>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/public_call.h"

namespace smp {

Join::Join(std::shared_ptr<dp::Joinable> replica, const JoinOptions& options)
    : replica_(std::move(replica)),
      enabled_(options.enable()),
      exceptions_(std::uncaught_exceptions()) {
  if (enabled_) replica_->begin_join(options);
}

Join::~Join() noexcept(false) {
  if (!enabled_) return;
  if (std::uncaught_exceptions() > exceptions_) {
    replica_->leave_join();
  } else {
    replica_->end_join();
  }
}

namespace dp {

void Joinable::begin_join(const JoinOptions& options) {
  SMP_CHECK_WITH(UsageError, !is_joining_, name_,
                 "::join was called inside of another; let the first end before");
  options_ = options;
  is_joining_ = true;
}

Joinable::Round Joinable::begin_round(bool reduces, bool broadcasts, int64_t kind) const {
  const Round all{replicas().size(), 0, reduces, broadcasts, kind};
  return is_joining_ ? exchange(true, all) : all;
}

int Joinable::divisor(const Round& round) const {
  const bool by_active = is_joining_ && !options_.divide_by_initial_world_size();
  return by_active ? round.active : replicas().size();
}

Joinable::Round Joinable::exchange(bool active, const Round& own) const {
  // Replicas outside of the join begin nothing together: they are told what this one is in.
  const std::string join = name_ + "::join";
  const core::PublicCallScope here(core::PublicCall(join, join));
  comm::Communicator& group = replicas();
  const at::Tensor mine = at::empty({4}, at::kLong);
  const at::Tensor all = at::empty({group.size(), 4}, at::kLong);
  int64_t* said = mine.mutable_data_ptr<int64_t>();
  said[0] = active;
  said[1] = own.reduces;
  said[2] = own.broadcasts;
  said[3] = own.kind;
  group.all_gather(all, mine);
  Round round;
  const auto heard = all.accessor<int64_t, 2>();
  for (int rank = group.size(); rank-- > 0;) {
    if (heard[rank][0] == 0) continue;
    ++round.active;
    round.first_active = rank;
    round.reduces = round.reduces || heard[rank][1] != 0;
    round.broadcasts = round.broadcasts || heard[rank][2] != 0;
    round.kind = heard[rank][3];
  }
  SMP_CHECK_WITH(
      UsageError,
      !options_.throw_on_early_termination() || round.active == group.size() || round.active == 0,
      name_, "::join: ", group.size() - round.active, " of ", group.size(),
      " replicas have no batches left, and throw_on_early_termination ends training on "
      "all of them");
  return round;
}

void Joinable::end_join() {
  int last_active = -1;
  for (;;) {
    const Round round = exchange(false, {});
    if (round.active == 0) break;
    last_active = round.first_active;
    take_part(round);
  }
  leave_join();
  // Ranks that ended together with the last were not told of another.
  const at::Tensor root = at::empty({1}, at::kLong);
  *root.mutable_data_ptr<int64_t>() = last_active < 0 ? replicas().rank() : -1;
  replicas().all_reduce(root, ReduceOp::kMax);
  take_model_of(static_cast<int>(*root.const_data_ptr<int64_t>()));
}

void Joinable::leave_join() { is_joining_ = false; }

}  // namespace dp
}  // namespace smp
