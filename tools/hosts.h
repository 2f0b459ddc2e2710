// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace smp::tools {

/// A host and how many ranks it takes.
struct Host {
  std::string name;
  int ranks = 1;
};

/// Reads "h1:2,h2:2"; a host without a number takes `default_ranks`. Throws `ConfigError`.
std::vector<Host> parse_hosts(const std::string& text, int default_ranks);

/// The hosts of a SLURM job: SLURM_JOB_NODELIST ("n[01-03,7],login") and SLURM_TASKS_PER_NODE
/// ("2(x3),1"; empty for one rank on each). Throws `ConfigError`.
std::vector<Host> slurm_hosts(const std::string& node_list, const std::string& tasks_per_node);

/// The ranks of all hosts.
int total_ranks(const std::vector<Host>& hosts);

/// "h1:2,h2:2", as mpirun's --host takes it.
std::string to_string(const std::vector<Host>& hosts);

}  // namespace smp::tools
