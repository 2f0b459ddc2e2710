// SPDX-License-Identifier: Apache-2.0
#include "runtime/together.h"

#include <algorithm>
#include <set>

#include "core/check.h"
#include "core/failure.h"
#include "runtime/attendance.h"

namespace smp::runtime {
namespace {

constexpr char kDone = '+', kMisused = 'U', kFailed = '-';

/// How it went on a rank: one of the above, then the result or the text of the error.
using Outcome = std::string;

Outcome outcome_of(const std::function<std::string()>& action) {
  try {
    return kDone + action();
  } catch (const CommError&) {
    throw;  // the ranks cannot talk any more
  } catch (const UsageError& error) {
    return kMisused + core::text_without_prefix(error);
  } catch (const Error& error) {
    return kFailed + core::text_without_prefix(error);
  } catch (const c10::Error& error) {
    return kFailed + std::string(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return kFailed + std::string(error.what());
  }
}

/// The errors, each text once.
std::string describe(const std::vector<Outcome>& outcomes) {
  std::set<std::string> texts;
  for (const Outcome& outcome : outcomes) {
    if (outcome[0] != kDone) texts.insert(outcome.substr(1));
  }
  if (texts.size() == 1) return *texts.begin();
  std::string list = c10::str("on several ranks:");
  for (size_t r = 0; r < outcomes.size(); ++r) {
    if (outcomes[r][0] == kDone || texts.erase(outcomes[r].substr(1)) == 0) continue;
    list += c10::str("\n- rank ", r, ": ", outcomes[r].substr(1));
  }
  return list;
}

bool any(const std::vector<Outcome>& outcomes, char kind) {
  return std::any_of(outcomes.begin(), outcomes.end(),
                     [&](const Outcome& outcome) { return outcome[0] == kind; });
}

/// The values that the actions of all ranks have returned, if none has failed. `own` is thrown
/// where all have failed alike, unless it is null.
std::vector<std::string> results_of_all(comm::Communicator& group, const Outcome& mine,
                                        const std::exception_ptr& own = nullptr) {
  std::vector<Outcome> outcomes = comm::all_gather_bytes(group, mine);
  const bool alike = std::count(outcomes.begin(), outcomes.end(), mine) == group.size();
  if (own && alike) std::rethrow_exception(own);
  if (any(outcomes, kMisused)) core::fail<UsageError>(describe(outcomes));
  if (any(outcomes, kFailed)) core::fail<CheckpointError>(describe(outcomes));
  for (Outcome& outcome : outcomes) outcome.erase(0, 1);
  return outcomes;
}

}  // namespace

std::vector<std::string> together(comm::Communicator& group,
                                  const std::function<std::string()>& action) {
  return results_of_all(group, outcome_of(action));
}

std::vector<std::string> together_for_long(comm::Communicator& group,
                                           const std::function<std::string()>& action) {
  Attendance attendance(group);
  const Outcome mine = outcome_of(action);
  attendance.finish();
  return results_of_all(group, mine);
}

void together_as_thrown(comm::Communicator& group, const std::function<void()>& action) {
  std::exception_ptr own;
  const Outcome mine = outcome_of([&]() -> std::string {
    try {
      action();
    } catch (...) {
      own = std::current_exception();
      throw;
    }
    return "";
  });
  results_of_all(group, mine, own);
}

void alone(comm::Communicator& group, const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    group.abort(core::message_of(error));
    throw;
  }
}

void FileWork::attempt(const std::function<void()>& action) {
  if (failure_ || !is_mine_) return;
  try {
    action();
  } catch (const CheckpointError&) {
    failure_ = std::current_exception();
  }
}

void FileWork::finish() const {
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace smp::runtime
