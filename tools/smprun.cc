// SPDX-License-Identifier: Apache-2.0
// smprun: starts the ranks of a program with mpirun, and says last which failure came first. Shows
// the actions of the ranks of running jobs.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>

#include "core/config_file.h"
#include "core/env.h"
#include "core/host.h"
#include "core/restart.h"
#include "core/stack_request.h"
#include "core/status_reader.h"
#include "core/topology.h"
#include "smp/exit_status.h"
#include "tools/failure_report.h"
#include "tools/job_folder.h"
#include "tools/job_run.h"
#include "tools/launch.h"
#include "tools/places.h"
#include "tools/process.h"
#include "tools/program.h"
#include "tools/restarts.h"

extern char** environ;

namespace smp::tools {
namespace {

constexpr int kUsageStatus = 2;
constexpr int kMostRestarts = 1000;
constexpr int kLongestWait = 24 * 3600;  // s
constexpr const char* kMemory = "/dev/shm";

std::string temporary_folder() { return core::env("TMPDIR").value_or("/tmp"); }

// Starts the ranks, and again after failures, as often as the user wants, but not when a signal has
// stopped the launcher. `has_copies`: whether ranks may have kept some.
int run_until_the_end(LaunchOptions options, LaunchContext& context, CommandRunner& runner,
                      bool& has_copies) {
  Restarts restarts(options.restarts, is_on_this_host(options, context));
  Places places(options, context, runner);
  for (;;) {
    const JobRun run = run_job(options, context, temporary_folder(), runner);
    has_copies = has_copies || !run.config_is_noted || run.config.recovery() != "off";
    std::cout.flush();  // the last line on the screen shall be the cause
    if (run.is_preempted) {
      std::cerr << run.preemption_report();
      return kPreemptedStatus;
    }
    const int status = run.result.exit_status;
    std::cerr << run.report;
    if (status == 0 || run.result.forwarded_signal != 0 || run.result.asked_to_stop) return status;
    const auto decision =
        places.decide(run, restarts.after(run.noted, run.config.recovery() != "off"));
    std::cerr << decision.text;
    const int waited = decision.again ? runner.wait(decision.wait) : 0;
    if (const int signal = std::max(places.signal(), waited)) {
      std::cerr << stop_report(signal);
      return 128 + signal;
    }
    if (!decision.again) return status;
    context.restart = restarts.next();
    options.np = run.ranks;  // also on fewer hosts
  }
}

// The job's folder, which ranks have made on other hosts: at once, else on those that answer.
void remove_elsewhere(const LaunchOptions& options, const LaunchContext& context,
                      CommandRunner& runner) {
  if (is_on_this_host(options, context)) return;
  const auto hosts = hosts_of(options, context);
  if (runner.run(plan_removal(options, context, hosts)).exit_status == 0) return;
  for (const auto& host : hosts) runner.run(plan_removal(options, context, {host}));
}

int run_with_restarts(const LaunchOptions& options, LaunchContext context) {
  CommandRunner runner;
  const auto users_own = core::env(core::kRecoveryDirVariable);
  // Goes away with the job.
  const JobFolder memory(access(kMemory, W_OK) == 0 ? kMemory : temporary_folder(),
                         "Set TMPDIR to a folder that can be written.");
  context.memory_dir = memory.path();
  context.recovery_dir = users_own.value_or(memory.path());
  bool has_copies = false;
  const int status = run_until_the_end(options, context, runner, has_copies);
  if (!users_own && has_copies) remove_elsewhere(options, context, runner);
  return status;
}

// Reads the environment's settings of mpirun.
void read_environment_of_mpi(LaunchContext& context) {
  constexpr std::string_view kPrefix = "OMPI_MCA_";
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    if (text.substr(0, kPrefix.size()) != kPrefix) continue;
    context.mpi_parameters.emplace(text.substr(kPrefix.size(), text.find('=') - kPrefix.size()));
  }
  // PBS, LSF and Grid Engine, and a setting for all users of mpirun.
  for (const char* name : {"PBS_NODEFILE", "LSB_MCPU_HOSTS", "LSB_AFFINITY_HOSTFILE", "PE_HOSTFILE",
                           "OMPI_MCA_orte_default_hostfile", "OMPI_MCA_orte_hostfile"}) {
    context.mpirun_knows_hosts = context.mpirun_knows_hosts || core::env(name);
  }
}

int launch(const LaunchOptions& options, bool dry_run) {
  LaunchContext context;
  context.parameters = core::env(core::kParametersVariable);
  context.is_root = geteuid() == 0;
  context.master_address = core::env("MASTER_ADDR");
  context.master_port = core::env("MASTER_PORT");
  context.one_thread = !core::env("OMP_NUM_THREADS");
  if (const auto nodes = core::env("SLURM_JOB_NODELIST")) {
    context.slurm_hosts = slurm_hosts(*nodes, core::env("SLURM_TASKS_PER_NODE").value_or(""));
  }
  context.host_name = core::host_name();
  read_environment_of_mpi(context);
  if (dry_run) {
    std::cout << shell_text(plan_launch(options, context)) << "\n";
    return 0;
  }
  context.output_is_terminal = isatty(STDOUT_FILENO) != 0;
  context.backtraces = core::env("SMP_BACKTRACE") == "1";
  return run_with_restarts(options, std::move(context));
}

// Shows the status of the jobs of that name, or of all.
int show_status(const std::string& name, bool stacks) {
  int shown = 0;
  for (core::JobStatus& job : core::read_jobs()) {
    if (!name.empty() && job.name != name) continue;
    if (stacks) ask_for_stacks(job);
    std::cout << (shown++ == 0 ? "" : "\n") << status_text(job);
  }
  if (shown > 0) return 0;
  std::cerr << "smprun: no job " << (name.empty() ? "" : name + " ")
            << "of this user runs on this host.\n";
  return 1;
}

}  // namespace
}  // namespace smp::tools

int main(int argc, char** argv) {
  using namespace smp::tools;  // NOLINT(google-build-using-namespace)
  LaunchOptions options;
  std::string job;
  int np = 0;
  bool dry_run = false, stacks = false;
  CLI::App app{
      "Starts the ranks of a program with mpirun: smprun [OPTIONS] PROGRAM ARGS...\n"
      "Shows what the ranks of running jobs do: smprun --status [JOB] [--stacks]\n"
      "See docs/configuration.md.",
      "smprun"};
  add_version(app);
  app.add_option("--config", options.config_file,
                 "JSON file with the parameters, or the estimator's distribution");
  auto* np_option =
      app.add_option(
             "--np", np,
             "Number of ranks; else what the hosts take, processes_per_host, or the product "
             "of the degrees in the configuration")
          ->check(CLI::Range(1, smp::core::Topology::kMostRanks));
  app.add_option("--hosts", options.hosts,
                 "Hosts and their ranks, h1:2,h2:2; else those of a SLURM job, else this one");
  app.add_flag("--dry-run", dry_run, "Check the configuration and print the command only");
  app.add_flag("--tag-output", options.tag_output, "Mark each line of output with its rank");
  app.add_option(
         "--restarts", options.restarts,
         "How often a job that fails is started again, to go on from its newest checkpoint; "
         "with \"recovery\" as often as it takes")
      ->check(CLI::Range(0, kMostRestarts));
  app.add_option("--wait-for-hosts", options.wait_for_hosts,
                 "Seconds that hosts which do not answer have to come back before a job is started "
                 "again, if the others are too few")
      ->check(CLI::Range(0, kLongestWait))
      ->capture_default_str();
  app.add_option("--start-timeout", options.start_timeout,
                 "Seconds until all ranks must be in smp::init, 0 for any time; else 600, or twice "
                 "\"timeout_seconds\"")
      ->check(CLI::Range(0, kLongestWait));
  auto* status_option =
      app.add_option("--status", job, "Show the ranks of a running job, or of all of this user");
  status_option->expected(0, 1)->option_text("[JOB]");
  app.add_flag("--stacks", stacks,
               "With --status: ask ranks on which others wait for the functions that they are in")
      ->needs(status_option);
  app.prefix_command();  // from the program on, everything belongs to the program
  CLI11_PARSE(app, argc, argv);
  if (*status_option) return show_status(job, stacks);
  options.program = app.remaining();
  if (!options.program.empty() && options.program.front() == "--") {
    options.program.erase(options.program.begin());
  }
  if (*np_option) options.np = np;
  if (options.program.empty() || options.program.front().front() == '-') {
    std::cerr << "smprun: expected a program to run, got "
              << (options.program.empty() ? "none" : options.program.front()) << ".\n"
              << app.help();
    return kUsageStatus;
  }
  return status_of([&] {
    read_config_pipe(options);
    return launch(options, dry_run);
  });
}
