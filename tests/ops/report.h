// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "tests/ops/check.h"

/// The results of a folder's samples, as numbers and as a page.
namespace smp::op_samples {

/// A sample that was run.
struct Result {
  std::string name;
  std::string subject;  ///< the operator or module
  Verdict verdict;
};

struct Report {
  std::vector<Result> results;
  std::vector<Skipped> skipped;  ///< those that are no list of operators

  /// The results of this kind.
  std::vector<Result> of(Kind kind) const;
};

/// Runs all samples of a folder that write_samples.py has written. Says on stderr which one is
/// under way, so that a crash has a name.
Report run_folder(const std::string& folder);

/// docs/operators.md.
std::string page(const Report& report);

/// The first sentence of a refusal, without names of step functions, operators and types.
std::string reason_of(const std::string& text);

}  // namespace smp::op_samples
