// SPDX-License-Identifier: Apache-2.0
#include "core/status_report.h"

#include <c10/util/StringUtil.h>
#include <c10/util/string_view.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <utility>

#include "core/status.h"
#include "core/table.h"

namespace smp::core {
namespace {

using Kind = ThreadState::Kind;

constexpr std::string_view kReceive = "receive ";

// "0.4 s", "41 s", "12 min", "3.5 h".
std::string duration(double seconds) {
  constexpr double kMinute = 60, kHour = 3600;
  std::array<char, 32> text{};
  if (seconds < 10) {
    std::snprintf(text.data(), text.size(), "%.1f s", seconds);
  } else if (seconds < 2 * kMinute) {
    std::snprintf(text.data(), text.size(), "%.0f s", seconds);
  } else if (seconds < 2 * kHour) {
    std::snprintf(text.data(), text.size(), "%.0f min", seconds / kMinute);
  } else {
    std::snprintf(text.data(), text.size(), "%.1f h", seconds / kHour);
  }
  return text.data();
}

std::string ranks_text(const std::vector<int>& ranks, int more) {
  std::string text =
      c10::str(ranks.size() + more == 1 ? "rank " : "ranks ", c10::Join(", ", ranks));
  return more == 0 ? text : c10::str(text, " and ", more, " more");
}

// "stopped", "sleeps in read".
std::string state_text(const ThreadState& state) {
  const std::string in = state.in.empty() ? "" : " in " + state.in;
  switch (state.kind) {
    case Kind::kComputes:
      return "computes";
    case Kind::kSleeps:
      return "sleeps" + in;
    case Kind::kStopped:
      return "stopped";
    case Kind::kBlocked:
      return "blocked in the kernel" + in +
             (state.swapped_mib > 0 ? c10::str(", ", state.swapped_mib, " MiB swapped out") : "");
    case Kind::kEnded:
      break;
  }
  return "ended";
}

// "1B0 of step 12", "the user's code after step 12".
std::string place_of(const RankStatus& one) {
  const bool is_users = one.action == kUsersCode;
  const bool is_between = is_users || c10::starts_with(one.action, "smp::");
  const std::string what = is_users ? "the user's code" : one.action;
  return one.step == 0 ? what : c10::str(what, is_between ? " after" : " of", " step ", one.step);
}

// "clock_nanosleep < load_batch < main": where a rank is, and who called that. If there are many,
// the first and the last, which are the program's.
std::string stack_text(std::vector<std::string> stack) {
  constexpr size_t kInnermost = 4, kOutermost = 8;
  if (stack.size() > kInnermost + 1 + kOutermost) {
    stack[kInnermost] = "...";
    stack.erase(stack.begin() + kInnermost + 1, stack.end() - kOutermost);
  }
  return c10::Join(" < ", stack);
}

// "is stopped; it has been in 1B0 of step 12 for 41 s", "computes; ..., and is in f < main".
std::string how_it_is(const RankStatus& one) {
  const Kind kind = one.state.kind;
  const std::string state = state_text(one.state);
  if (kind == Kind::kEnded) return "has ended";
  const bool is = kind == Kind::kStopped || kind == Kind::kBlocked;
  return c10::str(is ? "is " : "", state, "; it has been in ", place_of(one), " for ",
                  duration(one.action_seconds),
                  one.stack.empty() ? "" : ", and is in " + stack_text(one.stack));
}

// "waits for 5F2 of rank 1", "waits for rank 1 in all_reduce of smp::save".
std::string wait_text(const RankStatus& one, int next) {
  if (c10::starts_with(one.action, kReceive)) {
    return c10::str("waits for ", one.action.substr(kReceive.size()), " of rank ", next);
  }
  std::string in = one.wait;
  const bool is_same = one.action.find(one.wait) != std::string::npos;
  if (is_same || c10::starts_with(one.action, "send ")) {
    in = one.action;
  } else if (one.action != kUsersCode) {
    in += " of " + one.action;
  }
  return c10::str("waits for rank ", next, " in ", in);
}

// The chain of waits from a rank on.
struct Chain {
  enum class End { kRank, kElsewhere, kCircle };
  std::vector<const RankStatus*> waiting;
  End end = End::kRank;
  int last = 0;  // the rank that the last one waits for
};

// Which of the ranks that are waited for explains most.
int weight(const JobStatus& job, int rank, const std::vector<const RankStatus*>& seen) {
  const RankStatus* const one = job.find(rank);
  if (one == nullptr) return 1;
  if (one->is_waiting()) return std::count(seen.begin(), seen.end(), one) > 0 ? 0 : 3;
  switch (one->state.kind) {
    case Kind::kComputes:
      return 2;
    case Kind::kSleeps:
      return 4;
    case Kind::kBlocked:
      return 5;
    case Kind::kStopped:
    case Kind::kEnded:
      break;
  }
  return 6;
}

Chain chain_from(const JobStatus& job, const RankStatus& first) {
  Chain chain;
  for (const RankStatus* at = &first;;) {
    chain.waiting.push_back(at);
    const auto heavier = [&](int a, int b) {
      return weight(job, a, chain.waiting) < weight(job, b, chain.waiting);
    };
    chain.last = *std::max_element(at->waits_for.begin(), at->waits_for.end(), heavier);
    const RankStatus* const next = job.find(chain.last);
    if (next == nullptr) {
      chain.end = Chain::End::kElsewhere;
    } else if (std::count(chain.waiting.begin(), chain.waiting.end(), next) > 0) {
      chain.end = Chain::End::kCircle;
    } else if (next->is_waiting()) {
      at = next;
      continue;
    }
    return chain;
  }
}

std::string end_text(const JobStatus& job, const Chain& chain) {
  if (chain.end == Chain::End::kCircle) return ": a circle, as of calls that do not match";
  if (chain.end == Chain::End::kElsewhere) {
    return ", which is on host " + job.hosts.at(static_cast<size_t>(chain.last));
  }
  const RankStatus& last = *job.find(chain.last);
  if (last.state.kind == Kind::kEnded) return ", which has ended";
  return c10::str(", which has been in ", place_of(last), " for ", duration(last.action_seconds),
                  " (rank ", last.rank, ": ", state_text(last.state), ")");
}

std::string text_of(const JobStatus& job, const Chain& chain) {
  std::string text;
  for (size_t i = 0; i < chain.waiting.size(); ++i) {
    const bool is_last = i + 1 == chain.waiting.size();
    const int next = is_last ? chain.last : chain.waiting[i + 1]->rank;
    text += i == 0 ? c10::str("rank ", chain.waiting[i]->rank, " ") : ", which ";
    text += wait_text(*chain.waiting[i], next);
  }
  return text + end_text(job, chain);
}

// The longest chain to each end; of a circle one.
std::vector<Chain> longest_chains(const JobStatus& job) {
  std::map<std::pair<Chain::End, int>, Chain> longest;
  for (const RankStatus& one : job.ranks) {
    if (!one.is_waiting()) continue;
    Chain chain = chain_from(job, one);
    const int end = chain.end == Chain::End::kCircle ? 0 : chain.last;
    Chain& known = longest[{chain.end, end}];
    if (chain.waiting.size() > known.waiting.size()) known = std::move(chain);
  }
  std::vector<Chain> chains;
  for (auto& [end, chain] : longest) chains.push_back(std::move(chain));
  return chains;
}

// The ranks that a chain explains itself by: its last one, or all of the circle.
std::vector<int> causes_of(const Chain& chain) {
  if (chain.end == Chain::End::kElsewhere) return {};
  if (chain.end == Chain::End::kRank) return {chain.last};
  std::vector<int> circle;
  for (const RankStatus* one : chain.waiting) {
    if (one->rank == chain.last || !circle.empty()) circle.push_back(one->rank);
  }
  return circle;
}

std::vector<std::string> row_of(const RankStatus& one) {
  std::string waits_for;
  if (!one.waits_for.empty()) {
    waits_for = ranks_text(one.waits_for, one.more) + ", " + duration(one.wait_seconds);
  }
  const bool ended = one.state.kind == Kind::kEnded;
  return {std::to_string(one.rank),
          ended ? "" : std::to_string(one.process),
          ended ? "" : std::to_string(one.step),
          one.action,
          ended ? "" : duration(one.action_seconds),
          waits_for,
          one.is_waiting() ? "waits" : state_text(one.state)};
}

std::string table_text(const std::vector<RankStatus>& ranks) {
  Table table;
  for (const char* number : {"rank", "process", "step"}) table.column(number, Table::Align::kRight);
  table.column("does", Table::Align::kLeft);
  table.column("for", Table::Align::kRight);
  for (const char* text : {"waits for", "state"}) table.column(text, Table::Align::kLeft);
  for (const RankStatus& one : ranks) table.row(row_of(one));
  return table.to_string(/*has_rule=*/false);
}

// "ranks 2, 3 are on host h2: call smprun --status there".
std::string other_hosts(const JobStatus& job) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (size_t rank = 0; rank < job.hosts.size(); ++rank) {
    const int number = static_cast<int>(rank);
    if (job.find(number) == nullptr) ranks_of[job.hosts[rank]].push_back(number);
  }
  std::string text;
  for (const auto& [host, ranks] : ranks_of) {
    text += c10::str(ranks_text(ranks, 0), ranks.size() == 1 ? " is" : " are", " on host ", host,
                     ": call smprun --status there\n");
  }
  return text;
}

}  // namespace

bool RankStatus::is_waiting() const {
  return !waits_for.empty() && state.kind != Kind::kStopped && state.kind != Kind::kEnded;
}

const RankStatus* JobStatus::find(int rank) const {
  const auto found = std::find_if(ranks.begin(), ranks.end(),
                                  [&](const RankStatus& one) { return one.rank == rank; });
  return found == ranks.end() ? nullptr : &*found;
}

std::vector<int> causes_of_waits(const JobStatus& job) {
  std::vector<int> causes;
  for (const Chain& chain : longest_chains(job)) {
    const auto some = causes_of(chain);
    causes.insert(causes.end(), some.begin(), some.end());
  }
  return causes;
}

std::optional<StallCause> stall_cause(const JobStatus& job, int rank) {
  const RankStatus* const first = job.find(rank);
  if (first == nullptr || !first->is_waiting()) return std::nullopt;
  const Chain chain = chain_from(job, *first);
  if (chain.end != Chain::End::kRank) return std::nullopt;
  return StallCause{chain.last, how_it_is(*job.find(chain.last))};
}

std::string wait_chain(const JobStatus& job, int rank) {
  const RankStatus* const first = job.find(rank);
  if (first == nullptr || !first->is_waiting()) return "";
  return text_of(job, chain_from(job, *first));
}

std::string status_text(const JobStatus& job) {
  const size_t size = job.hosts.size();
  std::string text =
      c10::str("job ", job.name, ": ", job.program, ", ", size, size == 1 ? " rank" : " ranks",
               ", for ", duration(job.seconds), "\n");
  text += table_text(job.ranks) + other_hosts(job);
  for (const Chain& chain : longest_chains(job)) {
    text += text_of(job, chain) + "\n";
    for (const int rank : causes_of(chain)) {
      const auto& stack = job.find(rank)->stack;
      if (!stack.empty()) text += c10::str("rank ", rank, " is in ", stack_text(stack), "\n");
    }
  }
  return text;
}

}  // namespace smp::core
