// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace smp::comm {

/// How the ranks of a world lie on hosts.
struct WorldHosts {
  int local_rank = 0;              ///< This rank's place among those of its host.
  int local_size = 1;              ///< The ranks of this host.
  std::vector<std::string> names;  ///< The host name of each world rank.
};

}  // namespace smp::comm
