// SPDX-License-Identifier: Apache-2.0
#include "tools/restarts.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace smp::tools {
namespace {

constexpr int kLongestWait = 60;  // s
constexpr int kMostWithoutStep = 3;
// The newest; an environment variable cannot be of any length.
constexpr size_t kMostCheckpoints = 16;

/// The step from which the next start can go on.
int64_t next_begin(const core::JobProgress& progress) {
  const auto& saved = progress.checkpoints;
  return std::max(saved.empty() ? 0 : saved.back().steps, progress.kept_steps.value_or(0));
}

}  // namespace

core::Refusal Restarts::why_not(bool is_noted) const {
  if (!is_noted && !one_host_) {
    return "rank 0 has not come to smp::init, or cannot write to the launcher's folder. On several "
           "hosts, set TMPDIR to a folder that all of them see.";
  }
  if (without_step_ == kMostWithoutStep) {
    return c10::str(kMostWithoutStep, " starts in a row have ",
                    so_far_.steps == 0
                        ? "not come to the end of the first step."
                        : c10::str("come no further than step ", so_far_.steps, "."));
  }
  if (most_ == restarts_) return c10::str("all of --restarts ", *most_, " are used.");
  return std::nullopt;
}

/// Returns whether there is a new checkpoint or copy.
bool Restarts::take(const core::JobProgress& noted) {
  const bool has_copy = noted.kept_steps && noted.kept_steps > so_far_.kept_steps;
  so_far_.steps = std::max(so_far_.steps, noted.steps);
  if (has_copy) so_far_.kept_steps = noted.kept_steps;
  auto& all = so_far_.checkpoints;
  for (const core::SavedCheckpoint& checkpoint : noted.checkpoints) {
    const auto is_older = [&](const auto& other) { return other.path == checkpoint.path; };
    all.erase(std::remove_if(all.begin(), all.end(), is_older), all.end());
    all.push_back(checkpoint);
  }
  if (all.size() > kMostCheckpoints) all.erase(all.begin(), all.end() - kMostCheckpoints);
  return has_copy || !noted.checkpoints.empty();
}

void Restarts::count(const std::optional<core::JobProgress>& noted) {
  const auto before = std::pair(so_far_.steps, next_begin(so_far_));
  const bool has_saved = noted && take(*noted);
  const bool has_won = so_far_.steps > before.first || next_begin(so_far_) > before.second;
  without_checkpoint_ = has_saved ? 0 : without_checkpoint_ + 1;
  without_step_ = has_won ? 0 : without_step_ + 1;
}

/// A job that recovers and has come further goes on at once.
std::chrono::seconds Restarts::waiting_time(bool recovers) const {
  if (recovers && without_checkpoint_ == 0) return std::chrono::seconds(0);
  return std::chrono::seconds(std::min(1 << std::min(without_checkpoint_, 6), kLongestWait));
}

std::string Restarts::from() const {
  if (so_far_.copy_is_newest()) {
    return c10::str("the copy in memory, of step ", *so_far_.kept_steps);
  }
  if (so_far_.checkpoints.empty()) return "its start, no checkpoint is complete";
  return "checkpoint " + so_far_.checkpoints.back().path;
}

Restarts::Decision Restarts::after(const std::optional<core::JobProgress>& noted, bool recovers) {
  if (most_ == 0 || (!most_ && !recovers)) return {};
  count(noted);
  if (const core::Refusal reason = why_not(noted.has_value())) {
    return {false, "smprun: not started again: " + *reason + "\n", {}};
  }
  const auto wait = waiting_time(recovers);
  const std::string of = most_ ? c10::str(" of ", *most_) : "";
  return {true,
          c10::str("smprun: restart ", ++restarts_, of, " in ", wait.count(), " s: from ", from(),
                   "\n"),
          wait};
}

}  // namespace smp::tools
