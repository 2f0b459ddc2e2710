// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "tests/ops/sample.h"

/// Whether a sample gives over ranks the bits that it gives in plain libtorch.
namespace smp::op_samples {

/// How a sample ended.
enum class Kind {
  kEqual,         ///< one rank and two give the bits of plain libtorch
  kRefused,       ///< an error of smp with the remedy
  kWrong,         ///< other bits, or an error that is no refusal
  kPlainRefuses,  ///< plain libtorch throws
  kUnlikePython,  ///< plain libtorch does not give Python's results: the sample is not understood
};

/// A sample's result.
struct Verdict {
  Kind kind = Kind::kEqual;
  std::string text;  ///< the refusal or difference, without the name of rank and step
};

/// Runs the sample in plain libtorch, on one rank, and on two: the operators on the second, those
/// before and after them on the first. Two microbatches, on the leaves and on half of them.
Verdict check(const Sample& sample);

}  // namespace smp::op_samples
