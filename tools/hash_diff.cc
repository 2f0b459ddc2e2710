// SPDX-License-Identifier: Apache-2.0
#include "tools/hash_diff.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "core/check.h"

namespace smp::tools {
namespace {

using graph::HashedStep;
using graph::HashLogReader;
using graph::RowHashes;
using OfRanks = HashLogReader::OfRanks;

std::string name_of(const HashedStep& step) {
  return c10::str("call ", step.call + 1, " of step function \"", step.function, "\"");
}

std::set<RowHashes> values_of(const OfRanks& ranks) {
  std::set<RowHashes> values;
  for (const auto& [rank, hashes] : ranks) values.insert(hashes);
  return values;
}

/// "rank 0: 00ab..., ranks 2, 3: 00cd...".
std::string text_of(const OfRanks& ranks) {
  if (ranks.empty()) return "on no rank";
  std::map<RowHashes, std::vector<int>> by_value;
  for (const auto& [rank, hashes] : ranks) by_value[hashes].push_back(rank);
  std::ostringstream out;
  const char* separator = "";
  for (const auto& [hashes, who] : by_value) {
    out << separator << (who.size() == 1 ? "rank " : "ranks ") << c10::Join(", ", who) << ":"
        << std::hex;
    for (const uint64_t hash : hashes) out << " " << hash;
    out << std::dec;
    separator = "; ";
  }
  return out.str();
}

/// Where two graphs of one call part.
std::string other_operators(const HashLogReader& a, const HashedStep& in_a, const HashLogReader& b,
                            const HashedStep& in_b) {
  const auto &rows_a = a.rows(in_a.graph), &rows_b = b.rows(in_b.graph);
  size_t row = 0;
  while (row < rows_a.size() && row < rows_b.size() && rows_a[row] == rows_b[row]) ++row;
  const auto text = [&](const std::vector<std::string>& rows) {
    return row < rows.size() ? rows[row] : std::string("(nothing)");
  };
  return c10::str(name_of(in_a), " ran other operators. The first that differs is operator ", row,
                  ":\n  ", a.folder(), ": ", text(rows_a), "\n  ", b.folder(), ": ", text(rows_b),
                  "\n");
}

/// The same call in another log, of whatever graph.
std::optional<HashedStep> same_call(const HashLogReader& log, const HashedStep& step) {
  if (log.has(step)) return step;
  for (const HashedStep& other : log.steps()) {
    if (other.function == step.function && other.call == step.call) return other;
  }
  return std::nullopt;
}

/// The rows of two steps side by side, in their order.
std::map<std::pair<uint64_t, int>, std::pair<OfRanks, OfRanks>> merged(HashLogReader::Step a,
                                                                       HashLogReader::Step b) {
  std::map<std::pair<uint64_t, int>, std::pair<OfRanks, OfRanks>> rows;
  for (auto& [key, ranks] : a) rows[key].first = std::move(ranks);
  for (auto& [key, ranks] : b) rows[key].second = std::move(ranks);
  return rows;
}

}  // namespace

HashComparison compare_hashes(HashLogReader& a, HashLogReader& b) {
  size_t steps = 0, tensors = 0;
  for (const HashedStep& step : a.steps()) {
    const auto other = same_call(b, step);
    if (!other) continue;
    if (other->graph != step.graph) return {false, other_operators(a, step, b, *other)};
    ++steps;
    for (const auto& [key, ranks] : merged(a.read(step), b.read(step))) {
      const auto& [microbatch, row] = key;
      ++tensors;
      if (values_of(ranks.first) == values_of(ranks.second)) continue;
      return {false, c10::str("first difference: ", name_of(step), ", microbatch ", microbatch,
                              ", row ", row, " of the program: ", a.rows(step.graph)[row], "\n  ",
                              a.folder(), ": ", text_of(ranks.first), "\n  ", b.folder(), ": ",
                              text_of(ranks.second), "\n")};
    }
  }
  SMP_CHECK(steps > 0, "the logs \"", a.folder(), "\" and \"", b.folder(),
            "\" have no call of a step function together: ", a.steps().size(), " and ",
            b.steps().size(),
            " steps. Compare runs whose step functions have the same names, over the same steps");
  const size_t alone = a.steps().size() + b.steps().size() - 2 * steps;
  return {true,
          c10::str("no difference in ", steps, " steps (", tensors,
                   " operators and gradients of microbatches)",
                   alone == 0 ? "" : c10::str("; ", alone, " steps are in one log only"), "\n")};
}

}  // namespace smp::tools
