// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "smp/export.h"

namespace smp {

/// The groups of ranks. With pp, tp and rdp the digits of a rank:
enum class CommGroup {
  kWorld,  ///< all ranks
  kPp,     ///< the partitions of one pipeline: ranks that differ in pp_rank only
  kTp,     ///< ranks that differ in tp_rank only
  kRdp,    ///< ranks that hold the same parameters: they differ in rdp_rank only
  kMp,     ///< one whole model: ranks of the same rdp_rank (pp x tp of them)
  kDp,     ///< ranks that see different samples: those of the same pp_rank (rdp x tp of them)
};

/// "world", "pp", "tp", "rdp", "mp" or "dp".
SMP_API const char* to_string(CommGroup group);

}  // namespace smp
