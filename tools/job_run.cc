// SPDX-License-Identifier: Apache-2.0
#include "tools/job_run.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <set>

#include "core/failure.h"
#include "core/stop_request.h"
#include "smp/error.h"
#include "smp/exit_status.h"
#include "tools/failure_report.h"
#include "tools/job_folder.h"

namespace smp::tools {
namespace {

// Whether the program lies on this host, by the path given: not on those of --hosts or SLURM, nor
// in a folder that mpirun is told to change to.
bool is_here(const LaunchOptions& options, const LaunchContext& context,
             const LaunchCommand& command) {
  static const std::set<std::string> kFolder = {"-wdir", "--wdir", "-wd",
                                                "--wd",  "-path",  "--path"};
  const auto names_folder = [](const std::string& word) { return kFolder.count(word) > 0; };
  const auto own_options = command.arguments.end() - options.program.size();
  return is_on_this_host(options, context) &&
         std::none_of(command.arguments.begin(), own_options, names_folder);
}

// Nothing where the disk was full.
std::optional<Config> noted_configuration(const std::string& folder) {
  const auto json = core::read_configuration(folder);
  try {
    return json ? std::optional(Config::from_json(*json, "smprun")) : std::nullopt;
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

// "rank 1", "ranks 0, 2 and 5", "ranks 0, 1, 2 and 61 more".
std::string names_of(const std::vector<int>& ranks) {
  constexpr size_t kMost = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  const size_t named = ranks.size() > kMost ? kMost - 1 : ranks.size();
  for (size_t i = 0; i < named; ++i) {
    const bool is_last = i > 0 && i + 1 == ranks.size();
    text += c10::str(i == 0 ? "" : is_last ? " and " : ", ", ranks[i]);
  }
  return named < ranks.size() ? c10::str(text, " and ", ranks.size() - named, " more") : text;
}

// Why a job has to end that has run for as long as its ranks have to come to smp::init.
core::Refusal why_late(const std::string& folder, int ranks, std::chrono::seconds limit) {
  const std::set<int> arrived = core::read_arrivals(folder);
  std::vector<int> missing;
  for (int rank = 0; rank < ranks; ++rank) {
    if (arrived.count(rank) == 0) missing.push_back(rank);
  }
  if (missing.empty()) return std::nullopt;
  return c10::str(names_of(missing), missing.size() == 1 ? " has" : " have",
                  " not come to smp::init within ", limit.count(),
                  " s: mpirun could not start them, or they hang, or have much to do before. "
                  "--start-timeout SECONDS allows more, 0 any time");
}

// How long the job has to stop by itself; 0: it cannot.
std::chrono::nanoseconds ask_to_stop(const std::string& folder, const LaunchCommand& command) {
  const auto config = noted_configuration(folder);
  // On several hosts it is not known before whether rank 0 sees the folder.
  const double planned = command.shows_arrivals ? command.config.preempt_seconds() : 0;
  const double seconds = config ? config->preempt_seconds() : planned;
  if (seconds == 0 || !core::ask_to_stop(folder)) return std::chrono::nanoseconds(0);
  std::cerr << "smprun: asks the job to stop, within " << seconds << " s\n";
  return std::chrono::nanoseconds(std::llround(seconds * 1e9));
}

Supervision supervise(const LaunchOptions& options, const LaunchCommand& command,
                      const std::string& folder) {
  Supervision supervision;
  const auto limit = start_limit(options, command);
  if (command.shows_arrivals) supervision.start_limit = limit;
  supervision.why_late = [=, ranks = command.ranks] { return why_late(folder, ranks, limit); };
  supervision.ask_to_stop = [&command, folder] { return ask_to_stop(folder, command); };
  return supervision;
}

}  // namespace

bool is_on_this_host(const LaunchOptions& options, const LaunchContext& context) {
  return options.hosts.empty() && context.slurm_hosts.empty();
}

std::string JobRun::preemption_report() const {
  const int64_t steps = noted ? noted->steps : 0;
  if (!noted || noted->checkpoints.empty()) {
    return c10::str("smprun: preempted after step ", steps, ": no checkpoint was saved\n");
  }
  const auto& saved = noted->checkpoints.back();
  const std::string of = saved.steps == steps ? "" : c10::str(", after step ", steps);
  return c10::str("smprun: preempted", of, ": checkpoint ", saved.path, " of step ", saved.steps,
                  "\n");
}

JobRun run_job(const LaunchOptions& options, LaunchContext context, const std::string& temporary,
               CommandRunner& runner) {
  const JobFolder folder(temporary, "Set TMPDIR to a folder that can be written.");
  context.failure_dir = folder.path();
  const LaunchCommand command = plan_launch(options, context);
  if (is_here(options, context, command)) check_program(options.program.front());
  JobRun run;
  run.ranks = command.ranks;
  run.result = runner.run(command, supervise(options, command, folder.path()));
  run.noted = core::read_progress(folder.path());
  const auto noted_config = noted_configuration(folder.path());
  run.config_is_noted = noted_config.has_value();
  run.config = noted_config.value_or(command.config);
  const int status = run.result.exit_status;
  run.is_preempted =
      core::is_stopping(folder.path()) && (status == 0 || status == kPreemptedStatus);
  if (status != 0 && !run.is_preempted) {
    run.report = failure_report(core::read_failures(folder.path()), run.result);
  }
  return run;
}

}  // namespace smp::tools
