// SPDX-License-Identifier: Apache-2.0
// smprun: starts the ranks of a program with mpirun, and says last what failed first. Shows what
// the ranks of running jobs do.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <iostream>
#include <optional>
#include <string>

#include "core/check.h"
#include "core/config_file.h"
#include "core/env.h"
#include "core/failure.h"
#include "core/restart.h"
#include "core/stack_request.h"
#include "core/status_reader.h"
#include "tools/failure_report.h"
#include "tools/job_folder.h"
#include "tools/launch.h"
#include "tools/process.h"
#include "tools/restarts.h"
#include "tools/shrink.h"

namespace {

using smp::tools::JobFolder;
using smp::tools::LaunchCommand;
using smp::tools::LaunchContext;
using smp::tools::LaunchOptions;
using smp::tools::ProcessResult;
using smp::tools::Restarts;

constexpr int kUsageStatus = 2;
constexpr int kMostRanks = 1 << 20;
constexpr int kMostRestarts = 1000;
constexpr int kLongestWaitForHosts = 24 * 3600;  // s
constexpr const char* kMemory = "/dev/shm";

// Whether no other hosts are named, by the user or by SLURM.
bool is_on_this_host(const LaunchOptions& options, const LaunchContext& context) {
  return options.hosts.empty() && context.slurm_hosts.empty();
}

// Whether the program lies on this host, by the path given: not on those of --hosts or SLURM, nor
// in a folder that mpirun is told to change to.
bool is_here(const LaunchOptions& options, const LaunchContext& context,
             const LaunchCommand& command) {
  const auto names_folder = [](const std::string& word) {
    for (const char* name : {"-wdir", "--wdir", "-wd", "--wd", "-path", "--path"}) {
      if (word == name) return true;
    }
    return false;
  };
  const auto own_options = command.arguments.end() - options.program.size();
  return is_on_this_host(options, context) &&
         std::none_of(command.arguments.begin(), own_options, names_folder);
}

// How one start of the ranks went, as far as is known.
struct Run {
  ProcessResult result;
  std::string report;                           // of its failure
  std::optional<smp::core::JobProgress> noted;  // how far it came
  std::optional<smp::Config> config;            // that was in effect, if rank 0 could note it
  std::string planned_recovery;                 // by what the launcher knows
  int ranks = 0;

  std::string recovery() const { return config ? config->recovery() : planned_recovery; }
};

std::string temporary_folder() { return smp::core::env("TMPDIR").value_or("/tmp"); }

Run run_once(const LaunchOptions& options, LaunchContext context) {
  const JobFolder folder(temporary_folder(), "Set TMPDIR to a folder that can be written.");
  context.failure_dir = folder.path();
  const LaunchCommand command = plan_launch(options, context);
  if (is_here(options, context, command)) smp::tools::check_program(options.program.front());
  Run run;
  run.ranks = command.ranks;
  run.planned_recovery = command.recovery;
  run.result = run_process(command);
  if (run.result.exit_status != 0) {
    run.report = failure_report(smp::core::read_failures(folder.path()), run.result);
    run.noted = smp::core::read_progress(folder.path());
  }
  const auto json = smp::core::read_configuration(folder.path());
  if (json) run.config = smp::Config::from_json(*json, "smprun");
  return run;
}

// Where a job that is started again finds its places.
class Places {
 public:
  Places(const LaunchOptions& options, LaunchContext& context)
      : options_(options), context_(context), at_first_(count()) {}

  // Leaves out hosts that do not answer, and takes fewer ranks if the job wants that: on one host
  // each time, on several where too few answer.
  Restarts::Decision decide(const Run& run, Restarts::Decision decision) {
    if (!decision.again) return decision;
    const bool shrinks = run.recovery() == "shrink";
    const int needed = std::min(run.ranks, at_first_);  // ranks may share places
    look_for_hosts(needed);
    if (!shrinks) wait_for_hosts(needed);
    if (is_interrupted_) return {};
    const bool is_short = count() < needed || is_on_this_host(options_, context_);
    const std::string why_not = !shrinks ? too_few(needed) : is_short ? shrink(run) : "";
    for (const std::string& host : context_.lost_hosts) {
      decision.text += "smprun: host " + host + " does not answer, and is left out\n";
    }
    if (!why_not.empty()) {
      return {false, decision.text + "smprun: not started again: " + why_not + "\n", {}};
    }
    if (shrinks && is_short) {
      decision.text += "smprun: goes on with " + context_.layout->to_text() + "\n";
    }
    return decision;
  }

  // As a process, since whoever runs one hears signals. False if one came.
  bool wait(std::chrono::seconds time) {
    if (time.count() == 0) return true;
    LaunchCommand sleep;
    sleep.arguments = {"sleep", std::to_string(time.count())};
    is_interrupted_ = run_process(sleep).forwarded_signal != 0;
    return !is_interrupted_;
  }

 private:
  static constexpr std::chrono::seconds kBetweenLooks{5};

  int count() const {
    return is_on_this_host(options_, context_) ? kMostRanks
                                               : total_ranks(hosts_of(options_, context_));
  }

  bool answer(const std::vector<smp::tools::Host>& hosts) {
    const ProcessResult result = run_process(plan_probe(options_, context_, hosts));
    is_interrupted_ = is_interrupted_ || result.forwarded_signal != 0;
    return result.exit_status == 0;
  }

  // Those that were lost stay out while the others are enough: these have the copies.
  void look_for_hosts(int places) {
    if (is_on_this_host(options_, context_)) return;
    leave_out_those_that_do_not_answer();
    if (count() >= places || is_interrupted_) return;
    context_.lost_hosts.clear();
    leave_out_those_that_do_not_answer();
  }

  void leave_out_those_that_do_not_answer() {
    const auto hosts = hosts_of(options_, context_);
    if (answer(hosts)) return;
    for (const auto& host : hosts) {
      if (is_interrupted_) return;
      if (!answer({host})) context_.lost_hosts.insert(host.name);
    }
  }

  // Some may be starting.
  void wait_for_hosts(int places) {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::seconds(options_.wait_for_hosts);
    if (count() < places && Clock::now() < end) {
      std::cerr << "smprun: waits for hosts that do not answer, up to " << options_.wait_for_hosts
                << " s\n";
    }
    while (count() < places && Clock::now() < end && wait(kBetweenLooks)) look_for_hosts(places);
  }

  // Why the job cannot go on with as many ranks, or nothing.
  std::string too_few(int places) const {
    if (count() >= places) return "";
    return c10::str(places, " ranks need as many places, and the hosts that answer have ", count(),
                    ". Name more hosts with --hosts than --np needs.");
  }

  // Takes a layout with fewer ranks; why there is none, or nothing.
  std::string shrink(const Run& run) {
    smp::Config config = *run.config;
    const int most = run.ranks <= at_first_ ? count() : run.ranks * count() / at_first_;
    auto layout = smp::tools::shrink(config, run.ranks);
    while (layout && layout->ranks > most) {
      config = smp::Config::from_json(layout->put_into(config.to_json()), "smprun");
      layout = smp::tools::shrink(config, layout->ranks);
    }
    context_.layout = layout;
    return layout ? "" : "no layout with fewer ranks computes the same.";
  }

  const LaunchOptions& options_;
  LaunchContext& context_;
  const int at_first_;
  bool is_interrupted_ = false;  // by a signal to this process
};

// Starts the ranks, and again after failures, as often as the user wants. Whoever stops the
// launcher does not want that.
// `has_copies`: whether ranks may have kept some.
int run_until_the_end(LaunchOptions options, LaunchContext& context, bool& has_copies) {
  Restarts restarts(options.restarts, is_on_this_host(options, context));
  Places places(options, context);
  for (;;) {
    const Run run = run_once(options, context);
    has_copies = has_copies || !run.config || run.recovery() != "off";
    if (run.result.exit_status == 0) return 0;
    std::cout.flush();  // the last line on the screen shall be the cause
    std::cerr << run.report;
    if (run.result.forwarded_signal != 0) return run.result.exit_status;
    const auto decision = places.decide(
        run, restarts.after(smp::tools::cause_in(run.report), run.noted, run.recovery() != "off"));
    std::cerr << decision.text;
    if (!decision.again) return run.result.exit_status;
    if (!places.wait(decision.wait)) return run.result.exit_status;
    context.restart = restarts.next();
    options.np = run.ranks;  // also on fewer hosts
  }
}

// The job's folder, which ranks have made on other hosts: at once, else on those that answer.
void remove_elsewhere(const LaunchOptions& options, const LaunchContext& context) {
  if (is_on_this_host(options, context)) return;
  const auto hosts = hosts_of(options, context);
  if (run_process(plan_removal(options, context, hosts)).exit_status == 0) return;
  for (const auto& host : hosts) run_process(plan_removal(options, context, {host}));
}

int run_with_restarts(const LaunchOptions& options, LaunchContext context) {
  std::optional<JobFolder> memory;  // goes away with the job
  if (const auto users_own = smp::core::env(smp::core::kRecoveryDirVariable)) {
    context.recovery_dir = *users_own;
  } else {
    memory.emplace(access(kMemory, W_OK) == 0 ? kMemory : temporary_folder(),
                   "Set SMP_RECOVERY_DIR to a folder that can be written.");
    context.recovery_dir = memory->path();
  }
  bool has_copies = false;
  const int status = run_until_the_end(options, context, has_copies);
  if (memory && has_copies) remove_elsewhere(options, context);
  return status;
}

int launch(const LaunchOptions& options, bool dry_run) {
  LaunchContext context;
  context.parameters = smp::core::env(smp::core::kParametersVariable);
  context.is_root = geteuid() == 0;
  context.master_address = smp::core::env("MASTER_ADDR");
  context.master_port = smp::core::env("MASTER_PORT");
  context.one_thread = !smp::core::env("OMP_NUM_THREADS");
  if (const auto nodes = smp::core::env("SLURM_JOB_NODELIST")) {
    context.slurm_hosts =
        smp::tools::slurm_hosts(*nodes, smp::core::env("SLURM_TASKS_PER_NODE").value_or(""));
  }
  if (dry_run) {
    std::cout << shell_text(plan_launch(options, context)) << "\n";
    return 0;
  }
  context.output_is_terminal = isatty(STDOUT_FILENO) != 0;
  context.backtraces = smp::core::env("SMP_BACKTRACE") == "1";
  return run_with_restarts(options, std::move(context));
}

// Of the jobs of that name, or of all.
int show_status(const std::string& name, bool stacks) {
  int shown = 0;
  for (smp::core::JobStatus& job : smp::core::read_jobs()) {
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

int main(int argc, char** argv) {
  LaunchOptions options;
  std::string job;
  int np = 0;
  bool dry_run = false, stacks = false;
  CLI::App app{
      "Starts the ranks of a program with mpirun: smprun [OPTIONS] PROGRAM ARGS...\n"
      "Shows what the ranks of running jobs do: smprun --status [JOB] [--stacks]\n"
      "See docs/configuration.md.",
      "smprun"};
  app.add_option("--config", options.config_file,
                 "JSON file with the parameters, or the estimator's distribution");
  auto* np_option =
      app.add_option("--np", np,
                     "Number of ranks; else what the hosts take, processes_per_host or partitions")
          ->check(CLI::Range(1, kMostRanks));
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
      ->check(CLI::Range(0, kLongestWaitForHosts))
      ->capture_default_str();
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
  try {
    return launch(options, dry_run);
  } catch (const smp::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return kUsageStatus;
  }
}
