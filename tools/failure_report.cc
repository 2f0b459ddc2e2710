// SPDX-License-Identifier: Apache-2.0
#include "tools/failure_report.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <string_view>

#include "tools/launch.h"

namespace smp::tools {
namespace {

using core::Failure;
using Failures = std::vector<Failure>;

constexpr const char* kFirstCause = "smprun: first cause: ";

const Failure* find_kind(const Failures& failures, Failure::Kind kind) {
  const auto found = std::find_if(failures.begin(), failures.end(),
                                  [&](const Failure& one) { return one.kind == kind; });
  return found == failures.end() ? nullptr : &*found;
}

const Failure* find_rank(const Failures& failures, int rank) {
  const auto found = std::find_if(failures.begin(), failures.end(),
                                  [&](const Failure& one) { return one.rank == rank; });
  return found == failures.end() ? nullptr : &*found;
}

std::string with_message(const Failure& failure) {
  return c10::str(kFirstCause, "rank ", failure.rank, ": ", failure.message, "\n");
}

// A rank that has left no message of its own; `witness` may be null.
std::string without_message(int rank, const std::string& how, const Failure* witness) {
  const std::string cause = c10::str(kFirstCause, "rank ", rank, ": ", how, "\n");
  return witness == nullptr ? cause
                            : c10::str("smprun: noticed by rank ", witness->rank, ": ",
                                       witness->message, "\n", cause);
}

// The rank that did not wait, at the end of the chain that begins with `first`; nothing where ranks
// waited for each other in a circle.
std::optional<int> end_of_chain(const Failures& failures, const Failure& first) {
  std::set<int> seen{first.rank};
  for (const Failure* at = &first;;) {
    const Failure* next = nullptr;
    for (const int rank : at->missing) {
      const Failure* const theirs = find_rank(failures, rank);
      if (theirs == nullptr || theirs->missing.empty()) return rank;
      if (next == nullptr && seen.insert(rank).second) next = theirs;
    }
    if (next == nullptr) return std::nullopt;
    at = next;
  }
}

std::string report_of_waits(const Failures& failures, const Failure& first) {
  if (first.cause) return without_message(first.cause->rank, first.cause->how, &first);
  const auto rank = end_of_chain(failures, first);
  if (!rank) return with_message(first);
  return without_message(*rank,
                         "did not come, and waited for no other rank: it is stopped, computes "
                         "for longer than \"timeout_seconds\", or does not make the call",
                         &first);
}

// "1 with PID 0 on node vm exited on signal 9 (Killed)"
std::optional<EndedRank> ended_by_signal(const char* text) {
  int rank = 0, signal = 0, end = 0;
  char name[64];
  std::sscanf(text, "%9d with PID %*d on node %*s exited on signal %9d (%63[^()])%n", &rank,
              &signal, name, &end);
  if (end == 0) return std::nullopt;
  return EndedRank{rank, c10::str("was ended by signal ", signal, " (", name, ")")};
}

// "26449,1],12]\n  Exit code:    7"
std::optional<EndedRank> ended_by_status(const char* text) {
  int rank = 0, status = 0;
  if (std::sscanf(text, "%*d,%*d],%9d] Exit code: %9d", &rank, &status) != 2) return std::nullopt;
  return EndedRank{rank, c10::str("ended with exit status ", status)};
}

// Finds the first `begin` in `text` after which `read` finds anything. The ranks' output lies
// between the lines of mpirun, so any text may come.
std::optional<EndedRank> find_after(const std::string& text, std::string_view begin,
                                    std::optional<EndedRank> (*read)(const char*)) {
  for (size_t at = text.find(begin); at != std::string::npos; at = text.find(begin, at)) {
    at += begin.size();
    if (auto found = read(text.c_str() + at)) return found;
  }
  return std::nullopt;
}

}  // namespace

std::optional<EndedRank> ended_rank(const std::string& mpirun_says) {
  const auto by_signal = find_after(mpirun_says, "process rank ", &ended_by_signal);
  return by_signal ? by_signal : find_after(mpirun_says, "Process name: [[", &ended_by_status);
}

std::string failure_report(const Failures& failures, const ProcessResult& result) {
  if (result.forwarded_signal != 0) {
    return stop_report(result.forwarded_signal, result.ended_because);
  }
  if (!result.ended_because.empty()) return kFirstCause + result.ended_because + "\n";
  if (const Failure* own = find_kind(failures, Failure::Kind::kOwn)) return with_message(*own);
  if (result.own_signal != 0) {
    return c10::str(kFirstCause, "mpirun was ended by ", signal_text(result.own_signal), "\n");
  }
  const Failure* const witness = find_kind(failures, Failure::Kind::kPeerEnded);
  const auto ended = ended_rank(result.error_tail);
  if (ended && find_rank(failures, ended->rank) == nullptr) {
    return without_message(ended->rank, ended->how + " and left no message", witness);
  }
  if (witness != nullptr) {
    return without_message(witness->missing.front(), "its process has ended and left no message",
                           witness);
  }
  if (const Failure* first = find_kind(failures, Failure::Kind::kTimedOut)) {
    return report_of_waits(failures, *first);
  }
  if (!failures.empty()) return with_message(failures.front());
  return c10::str(kFirstCause, "no rank left a message; ", explain_exit(result.exit_status), "\n");
}

std::string stop_report(int signal, const std::string& because) {
  return c10::str("smprun: stopped by ", signal_text(signal), because.empty() ? "" : ": ", because,
                  "\n");
}

}  // namespace smp::tools
