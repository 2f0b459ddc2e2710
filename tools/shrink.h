// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "smp/config.h"

namespace smp::tools {

/// How a job lies on its ranks: the settings that decide their number, and those that must change
/// with it for the results to stay.
struct Layout {
  int ranks = 1;
  int64_t partitions = 1;
  int64_t microbatches = 1;  ///< microbatches of a replica
  int64_t gradient_shards = 1;
  int64_t tensor_parallel_degree = 1;

  /// "2 ranks: 2 stages x 1 replica, 8 microbatches"
  std::string to_text() const;
  /// The object of parameters `json` with these in it.
  std::string put_into(const std::string& json) const;
};

/// The layout with fewer than `ranks` ranks in which a job of this configuration, all of which is
/// in effect, computes the same: the replicas that are left run the microbatches of those that are
/// not, in the same shards of gradients; where there is one only, the model is divided into one
/// stage less. Nothing if there is none.
std::optional<Layout> shrink(const Config& config, int ranks);

}  // namespace smp::tools
