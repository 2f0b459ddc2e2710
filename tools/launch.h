// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/restart.h"
#include "smp/config.h"
#include "tools/hosts.h"
#include "tools/shrink.h"

namespace smp::tools {

/// The user's request to `smprun`.
struct LaunchOptions {
  /// The file with the configuration; empty for none.
  std::string config_file;
  /// Its content, where it is a pipe, which can be read once: see `read_config_pipe`.
  std::optional<std::string> config_text;
  /// The number of ranks, if given on the command line.
  std::optional<int> np;
  /// The hosts as the user named them, "h1:2,h2:2"; empty for this one, or those of a SLURM job.
  std::string hosts;
  /// Whether mpirun marks each line of output with its rank.
  bool tag_output = false;
  /// How often a job that has failed is started again, at most; nothing: as its configuration says.
  std::optional<int> restarts;
  /// How many seconds hosts that do not answer have to come back before a job is started again, if
  /// the others are too few.
  int wait_for_hosts = 600;
  /// How many seconds the ranks have until all are in `smp::init`, 0 for any time; nothing: see
  /// `start_limit`.
  std::optional<int> start_timeout;
  /// The program to run and its arguments.
  std::vector<std::string> program;
};

/// The launcher's knowledge of the machine and the caller.
struct LaunchContext {
  /// The caller's `SM_HP_MP_PARAMETERS`, if set.
  std::optional<std::string> parameters;
  /// mpirun refuses to run as root unless told.
  bool is_root = false;
  /// The folder for the last words of ranks, see `core::record_failure`; empty for none.
  std::string failure_dir;
  /// The folder that outlives the processes of the job, see `core::kRecoveryDirVariable`; empty for
  /// none.
  std::string recovery_dir;
  /// The job's own folder in memory, for memory that MPI shares between ranks of this host; empty
  /// for none.
  std::string memory_dir;
  /// Replaces that of the configuration and the command line; nothing at the first start.
  std::optional<Layout> layout;
  /// The news for a job that is started again; nothing at the first start.
  std::optional<core::Restart> restart;
  /// False when standard output is a pipe or a file. mpirun gives every rank a terminal of its own,
  /// so programs would not notice; they are told by TERM=dumb.
  bool output_is_terminal = true;
  /// False where MPI shall not print the stack of a rank that crashes.
  bool backtraces = true;
  /// The hosts of the SLURM job that the launcher runs in; empty outside of one.
  std::vector<Host> slurm_hosts;
  /// Name of this host; empty: not known.
  std::string host_name;
  /// Whether mpirun may know of other hosts: another scheduler's, or those of a file.
  bool mpirun_knows_hosts = false;
  /// The parameters of Open MPI that the caller's environment sets; they win.
  std::set<std::string> mpi_parameters;
  /// Hosts that have not answered, and are left out.
  std::set<std::string> lost_hosts;
  /// The caller's MASTER_ADDR and MASTER_PORT, if set: where ranks of c10d meet.
  std::optional<std::string> master_address;
  std::optional<std::string> master_port;
  /// True when the caller has not set OMP_NUM_THREADS: each rank then computes with one thread,
  /// since ranks share the cores of a host and libtorch would take all of them in each.
  bool one_thread = false;
};

/// A command as an argument vector; no shell is involved.
struct LaunchCommand {
  int ranks = 0;  ///< that it starts
  Config config;  ///< the part that the launcher knows
  /// Whether SIGTERM to the command itself is left to the launcher.
  bool outlives_sigterm = false;
  /// Whether its ranks call `smp::init`, where the launcher sees it.
  bool shows_arrivals = false;
  std::vector<std::string> arguments;
  /// Variables set for the command, in addition to the caller's.
  std::vector<std::pair<std::string, std::string>> environment;
};

/// Reads `options.config_file` if it is a pipe, as the shell's <(command) and /dev/stdin are, for
/// at most a minute. Throws `ConfigError`. Ranks are given the content; they do not open it.
void read_config_pipe(LaunchOptions& options);

/// Checks the configuration and makes the mpirun command. The number of ranks is `options.np`, else
/// the places of the hosts, else mpi.processes_per_host of the file, else the product of
/// "partitions", "tensor_parallel_degree" and "sharded_data_parallel_degree". A host that is named
/// without a number takes mpi.processes_per_host ranks, else one. With the strategy of data
/// parallelism the ranks get the address where c10d's meet, the first host's. Throws `ConfigError`
/// with the texts of docs/configuration.md, and when both a file and `context.parameters` are
/// given.
LaunchCommand plan_launch(const LaunchOptions& options, const LaunchContext& context);

/// How long the ranks have until all are in `smp::init`; 0: any time. By default ten minutes, or
/// twice the configuration's `timeout_seconds` if that is longer.
std::chrono::seconds start_limit(const LaunchOptions& options, const LaunchCommand& command);

/// The hosts that the job is started on; empty: this one. Throws as above.
std::vector<Host> hosts_of(const LaunchOptions& options, const LaunchContext& context);

/// The command that fails, and within half a minute, if one of `hosts` does not start a program of
/// the job's user. Throws as above.
LaunchCommand plan_probe(const LaunchOptions& options, const LaunchContext& context,
                         const std::vector<Host>& hosts);

/// The command that removes the folder `context.recovery_dir`, which the launcher made for its job,
/// on `hosts`. Throws as above.
LaunchCommand plan_removal(const LaunchOptions& options, const LaunchContext& context,
                           const std::vector<Host>& hosts);

/// Splits `text` at blanks as a shell does, with 'single' and "double" quotes and backslashes.
/// Nothing is expanded. Throws `ConfigError` that starts with `where` when a quote is not closed.
std::vector<std::string> split_options(const std::string& text, const std::string& where);

/// `text` quoted so that a POSIX shell reads it as one word.
std::string shell_quoted(const std::string& text);

/// The command as a line that can be pasted into a POSIX shell.
std::string shell_text(const LaunchCommand& command);

/// "signal 15 (Terminated)".
std::string signal_text(int signal);

/// The meaning of mpirun's exit status (0 to 255): how the ranks ended.
std::string explain_exit(int exit_status);

}  // namespace smp::tools
