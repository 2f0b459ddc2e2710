// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "graph/hash_log.h"

namespace smp::tools {

/// The results that two runs have in common.
struct HashComparison {
  bool are_equal = true;
  std::string text;  ///< for people: the compared logs, or the first difference
};

/// Compares two logs of hashes: the first tensor that differs, by step (in `a`'s order), microbatch
/// and program order. Where a run computed a tensor on several ranks, each must have it. Throws
/// `Error` where the logs have no step together.
HashComparison compare_hashes(graph::HashLogReader& a, graph::HashLogReader& b);

}  // namespace smp::tools
