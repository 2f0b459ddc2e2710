// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <string>
#include <utility>
#include <vector>

#include "smp/name_map.h"

namespace smp {

/// Options of `load_pretrained`.
struct PretrainedOptions {
  TORCH_ARG(NameMap, names);
  /// Stored tensors that the model lacks, and the other way round, are an error.
  TORCH_ARG(bool, strict) = true;
  /// Floating point tensors may be stored in another floating point type than the model's.
  TORCH_ARG(bool, convert) = true;
};

/// The names used of pretrained files, all sorted.
struct PretrainedReport {
  std::vector<std::pair<std::string, std::string>> used;  ///< stored name, the model's
  std::vector<std::string> unused;   ///< stored, but the model has nothing of the mapped name
  std::vector<std::string> ignored;  ///< stored, and left out by a rule
  std::vector<std::string> missing;  ///< names of the model that are stored under no name
};

}  // namespace smp
