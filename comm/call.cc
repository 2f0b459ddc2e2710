// SPDX-License-Identifier: Apache-2.0
#include "comm/call.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <type_traits>

namespace smp::comm {
namespace {

static_assert(std::is_trivially_copyable_v<Call>);

bool all_match(const std::vector<Call>& calls, const std::function<bool(const Call&)>& matches) {
  return std::all_of(calls.begin(), calls.end(), matches);
}

// "is in smp::save". A collective that the user's own code starts says which.
std::string caller_text(const Call& call) {
  const std::string caller = call.caller.text();
  return caller.empty() ? "called " + call.collective.text() : "is in " + caller;
}

template <class Text>
std::string list_of(const std::vector<int>& ranks, const std::vector<Call>& calls,
                    const Text& text) {
  std::string list;
  for (size_t i = 0; i < calls.size(); ++i) {
    list += c10::str(i == 0 ? "" : ", ", "rank ", ranks[i], " ", text(calls[i]));
  }
  return list;
}

}  // namespace

Call call_of(const Signature& collective) { return {collective, core::this_public_call()}; }

std::string mismatch_text(const std::vector<int>& ranks, const std::vector<Call>& calls) {
  const Call& first = calls.front();
  if (all_match(calls, [&](const Call& call) { return call.matches(first); })) {
    return "";
  }
  const auto in_same = [&](const Call& call) { return call.caller.is_of_kind_of(first.caller); };
  if (!all_match(calls, in_same)) {
    return list_of(ranks, calls, caller_text) +
           ". All ranks must make the same calls in the same order: look for one that only some "
           "ranks make, as within if (smp::rank() == 0).";
  }
  return list_of(ranks, calls,
                 [](const Call& call) { return "called " + call.collective.text(); }) +
         ". All ranks must call the same collectives of a group in the same order, with the same "
         "op, type, number of elements and root.";
}

}  // namespace smp::comm
