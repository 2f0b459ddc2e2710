// SPDX-License-Identifier: Apache-2.0
#include "tools/launch.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "core/check.h"
#include "core/config_file.h"
#include "core/failure.h"
#include "core/json.h"
#include "core/topology.h"

namespace smp::tools {
namespace {

using core::Distribution;
using core::kFailureDirVariable;
using core::kParametersVariable;

// The number that torchrun chooses.
constexpr const char* kThreadsVariable = "OMP_NUM_THREADS";
constexpr const char* kMasterPort = "29500";

// Open MPI's parameter; mpirun hands on those that the environment sets.
constexpr const char* kSignalsWithStack = "OMPI_MCA_opal_signal";

// The configuration that the launcher can see, or nothing: then the program brings its own.
std::optional<Distribution> find_distribution(const LaunchOptions& options,
                                              const LaunchContext& context) {
  const bool has_file = !options.config_file.empty();
  SMP_CHECK_WITH(ConfigError, !(has_file && context.parameters), "smprun: both --config ",
                 options.config_file, " and the environment variable ", kParametersVariable,
                 " are set: expected one of them. Unset ", kParametersVariable,
                 ", or leave --config out.");
  if (options.config_text) {
    return Distribution::from_json(*options.config_text, options.config_file);
  }
  if (has_file) return Distribution::from_file(options.config_file);
  if (context.parameters) return Distribution::from_json(*context.parameters, kParametersVariable);
  return std::nullopt;
}

/// Puts the new layout into the configuration when the job goes on in another one.
void put_into(const Layout& layout, std::optional<Distribution>& distribution) {
  if (!distribution) distribution.emplace();
  std::string& json = distribution->parameters_json;
  json = layout.put_into(json.empty() ? "{}" : json);
  distribution->config = Config::from_json(json, kParametersVariable);
}

// Sizes that the configuration does not set, the program may set.
void check_size(Config config, int ranks) {
  if (!config.is_set("ddp")) config.ddp(true);
  if (!config.ddp() && !config.is_set("partitions")) config.partitions(ranks);
  core::Topology::check_size(config, ranks);
}

bool is_data_parallel(const std::optional<Distribution>& distribution) {
  return distribution && distribution->strategy == core::Strategy::kDataParallel;
}

std::vector<Host> find_hosts(const LaunchOptions& options, const LaunchContext& context,
                             const std::optional<Distribution>& distribution) {
  const auto per_host = distribution ? distribution->processes_per_host : std::nullopt;
  auto hosts = options.hosts.empty()
                   ? context.slurm_hosts
                   : parse_hosts(options.hosts, static_cast<int>(per_host.value_or(1)));
  const auto is_lost = [&](const Host& host) { return context.lost_hosts.count(host.name) > 0; };
  hosts.erase(std::remove_if(hosts.begin(), hosts.end(), is_lost), hosts.end());
  return hosts;
}

/// The number of ranks that a configuration asks for.
int checked_count(int64_t ranks) {
  SMP_CHECK_WITH(ConfigError, ranks <= core::Topology::kMostRanks,
                 "smprun: the configuration asks for ", ranks, " ranks: expected at most ",
                 core::Topology::kMostRanks,
                 ". Set smaller degrees or mpi.processes_per_host, or give --np N.");
  return static_cast<int>(ranks);
}

int rank_count(const LaunchOptions& options, const std::vector<Host>& hosts,
               const std::optional<Distribution>& distribution) {
  if (options.np) return *options.np;
  if (!hosts.empty()) return total_ranks(hosts);
  SMP_CHECK_WITH(ConfigError,
                 !is_data_parallel(distribution) || distribution->processes_per_host.has_value(),
                 "smprun: the number of ranks is unknown: the dataparallel strategy needs --np N, "
                 "--hosts HOST:RANKS,... or mpi.processes_per_host. Give one of them.");
  SMP_CHECK_WITH(ConfigError, distribution.has_value(),
                 "smprun: the number of ranks is unknown: expected --np N or --config FILE, got "
                 "neither. Give one of them.");
  if (distribution->processes_per_host) return checked_count(*distribution->processes_per_host);
  const Config& config = distribution->config;
  const auto says = [&](const char* key) { return config.is_set(key); };
  SMP_CHECK_WITH(
      ConfigError,
      says("partitions") || says("tensor_parallel_degree") || says("sharded_data_parallel_degree"),
      "smprun: the number of ranks is unknown: the configuration has none of "
      "\"partitions\", \"tensor_parallel_degree\", \"sharded_data_parallel_degree\" and "
      "mpi.processes_per_host. Give --np N.");
  return checked_count(core::Topology::least_size(config));
}

class MpirunArguments {
 public:
  MpirunArguments(std::vector<std::string> custom, const std::set<std::string>& in_environment)
      : custom_(std::move(custom)), in_environment_(in_environment) {}

  // Adds an option unless the user's own options have it: mpirun refuses some twice.
  void add(const std::string& option, const std::string& value) {
    if (!user_has(option)) append({"--" + option, value});
  }
  // `others` exclude it.
  void add_mca(const std::string& name, const std::string& value,
               const std::vector<std::string>& others = {}) {
    const auto is_set = [&](const std::string& one) {
      return user_has(one) || in_environment_.count(one) > 0;
    };
    if (is_set(name) || std::any_of(others.begin(), others.end(), is_set)) return;
    append({"--mca", name, value});
  }
  void append(const std::vector<std::string>& words) {
    words_.insert(words_.end(), words.begin(), words.end());
  }
  void append_custom() { append(custom_); }
  std::vector<std::string> take() { return std::move(words_); }

  bool user_has(const std::string& name) const {
    for (const std::string& word : custom_) {
      if (word == name || word == "-" + name || word == "--" + name) return true;
    }
    return false;
  }

 private:
  std::vector<std::string> custom_;
  const std::set<std::string>& in_environment_;
  std::vector<std::string> words_;
};

/// Whether that is this host; one of the two names may lack its domain.
bool is_this(const Host& host, const LaunchContext& context) {
  const std::string &name = host.name, &own = context.host_name;
  const auto begins_with = [](const std::string& whole, const std::string& part) {
    return !part.empty() && whole.rfind(part + ".", 0) == 0;
  };
  return name == "localhost" || name == own || begins_with(own, name) || begins_with(name, own);
}

/// Whether all ranks run on this host, as far as is known.
bool is_on_one_host(const MpirunArguments& mpirun, const LaunchContext& context,
                    const std::vector<Host>& hosts) {
  const bool are_named = !hosts.empty();
  if (are_named && (hosts.size() > 1 || !is_this(hosts.front(), context))) return false;
  if (!are_named && context.mpirun_knows_hosts) return false;
  for (const char* option : {"host", "H", "hostfile", "machinefile", "default-hostfile"}) {
    if (mpirun.user_has(option)) return false;
  }
  return true;
}

/// MPI's leftovers go away with the job's folders when it is killed. Without messages to other
/// hosts no rank listens to the network.
void keep_to_this_host(MpirunArguments& mpirun, const LaunchContext& context) {
  mpirun.add_mca("btl", "vader,self");
  if (!context.memory_dir.empty()) {
    mpirun.add_mca("btl_vader_backing_directory", context.memory_dir);
  }
  if (!context.failure_dir.empty()) {
    mpirun.add_mca("orte_tmpdir_base", context.failure_dir,
                   {"orte_local_tmpdir_base", "orte_remote_tmpdir_base"});
  }
}

/// The user's own options of mpirun.
std::vector<std::string> custom_options(const LaunchOptions& options,
                                        const std::optional<Distribution>& distribution) {
  const std::string source =
      options.config_file.empty() ? kParametersVariable : options.config_file;
  return split_options(
      distribution ? distribution->custom_mpi_options : "",
      source + (is_data_parallel(distribution) ? ": \"dataparallel.custom_mpi_options\": "
                                               : ": \"mpi.custom_mpi_options\": "));
}

/// mpirun with the options about the machine and the hosts.
MpirunArguments begin_mpirun(const LaunchOptions& options, const LaunchContext& context,
                             const std::vector<Host>& hosts, int ranks,
                             std::vector<std::string> custom) {
  MpirunArguments mpirun(std::move(custom), context.mpi_parameters);
  // Ranks may outnumber cores, and a rank must not be tied to a core that others compute on.
  mpirun.append({"mpirun", "-np", std::to_string(ranks), "--oversubscribe"});
  if (!hosts.empty()) mpirun.append({"--host", to_string(hosts)});
  mpirun.add("bind-to", "none");
  if (context.is_root) mpirun.append({"--allow-run-as-root"});
  if (options.tag_output) mpirun.append({"--tag-output"});
  mpirun.add_mca("orte_abort_on_non_zero_status", "1");
  // Containers forbid the system call that the default mechanism needs.
  mpirun.add_mca("btl_vader_single_copy_mechanism", "none");
  if (is_on_one_host(mpirun, context, hosts)) keep_to_this_host(mpirun, context);
  mpirun.append_custom();
  return mpirun;
}

/// The user's options of mpirun that do not say how many processes run where.
std::vector<std::string> without_mapping(const std::vector<std::string>& options) {
  static const std::set<std::string> kMapping = {
      "np",         "n",      "c",        "N",           "npernode",
      "npersocket", "map-by", "rank-by",  "bind-to",     "cpus-per-proc",
      "host",       "H",      "hostfile", "machinefile", "cpu-list",
      "cpu-set",    "x"};
  std::vector<std::string> result;
  for (size_t i = 0; i < options.size(); ++i) {
    const size_t name = options[i].find_first_not_of('-');
    if (name > 0 && name != std::string::npos && kMapping.count(options[i].substr(name)) > 0) {
      ++i;  // its value
    } else {
      result.push_back(options[i]);
    }
  }
  return result;
}

/// A program on each of some hosts, once. The text of mpirun about a host that does not answer is
/// long, and its wait for one is longer.
LaunchCommand on_each(const LaunchOptions& options, const LaunchContext& context,
                      std::vector<Host> hosts, const std::vector<std::string>& program) {
  for (Host& host : hosts) host.ranks = 1;
  LaunchCommand command;
  command.ranks = total_ranks(hosts);
  const auto custom = custom_options(options, find_distribution(options, context));
  MpirunArguments mpirun =
      begin_mpirun(options, context, hosts, command.ranks, without_mapping(custom));
  mpirun.append(program);
  command.arguments = {
      "timeout", "--foreground", "-k", "5", "30", "sh", "-c", "exec \"$@\" >/dev/null 2>&1", "sh"};
  for (std::string& word : mpirun.take()) command.arguments.push_back(std::move(word));
  return command;
}

}  // namespace

void read_config_pipe(LaunchOptions& options) {
  constexpr std::chrono::minutes kPatience{1};
  std::error_code ignored;  // a file that is not there: reading it says so
  if (!std::filesystem::is_fifo(options.config_file, ignored)) return;
  options.config_text = core::read_pipe(options.config_file, "the configuration file", kPatience);
}

LaunchCommand plan_launch(const LaunchOptions& options, const LaunchContext& context) {
  auto distribution = find_distribution(options, context);
  if (context.layout) put_into(*context.layout, distribution);
  const bool data_parallel = is_data_parallel(distribution);
  const bool model_parallel = distribution && !data_parallel;
  if (model_parallel) distribution->config.validate();
  const std::vector<Host> hosts = find_hosts(options, context, distribution);
  const int ranks =
      context.layout ? context.layout->ranks : rank_count(options, hosts, distribution);
  if (model_parallel) check_size(distribution->config, ranks);

  MpirunArguments mpirun =
      begin_mpirun(options, context, hosts, ranks, custom_options(options, distribution));
  // Fewer ranks on several hosts: on all of them, since each has a part of the copy.
  if (context.layout && hosts.size() > 1) mpirun.add("map-by", "node");
  LaunchCommand command;
  const auto export_variable = [&](const char* name, const std::string& value) {
    mpirun.append({"-x", name});
    command.environment.emplace_back(name, value);
  };
  if (!context.failure_dir.empty()) export_variable(kFailureDirVariable, context.failure_dir);
  if (!context.recovery_dir.empty()) {
    export_variable(core::kRecoveryDirVariable, context.recovery_dir);
  }
  if (context.restart) export_variable(core::kRestartVariable, context.restart->to_text());
  if (model_parallel) export_variable(kParametersVariable, distribution->parameters_json);
  if (data_parallel) {
    const std::string first = hosts.empty() ? "127.0.0.1" : hosts.front().name;
    export_variable("MASTER_ADDR", context.master_address.value_or(first));
    export_variable("MASTER_PORT", context.master_port.value_or(kMasterPort));
  }
  const std::string custom = distribution ? distribution->custom_mpi_options : "";
  if (context.one_thread && custom.find(kThreadsVariable) == std::string::npos) {
    export_variable(kThreadsVariable, "1");
  }
  if (!context.output_is_terminal) export_variable("TERM", "dumb");
  if (!context.backtraces) command.environment.emplace_back(kSignalsWithStack, "");
  mpirun.append(options.program);
  command.ranks = ranks;
  if (model_parallel) command.config = distribution->config;
  command.outlives_sigterm = command.config.preempt_seconds() > 0;
  command.shows_arrivals = !data_parallel && is_on_one_host(mpirun, context, hosts);
  command.arguments = mpirun.take();
  return command;
}

std::chrono::seconds start_limit(const LaunchOptions& options, const LaunchCommand& command) {
  constexpr std::chrono::seconds kDefault{600};
  if (options.start_timeout) return std::chrono::seconds(*options.start_timeout);
  return std::max(kDefault,
                  std::chrono::seconds(std::llround(2 * command.config.timeout_seconds())));
}

std::vector<Host> hosts_of(const LaunchOptions& options, const LaunchContext& context) {
  return find_hosts(options, context, find_distribution(options, context));
}

LaunchCommand plan_probe(const LaunchOptions& options, const LaunchContext& context,
                         const std::vector<Host>& hosts) {
  return on_each(options, context, hosts, {"true"});
}

LaunchCommand plan_removal(const LaunchOptions& options, const LaunchContext& context,
                           const std::vector<Host>& hosts) {
  return on_each(options, context, hosts, {"rm", "-rf", context.recovery_dir});
}

std::vector<std::string> split_options(const std::string& text, const std::string& where) {
  std::vector<std::string> words;
  std::string word;
  bool in_word = false;
  char quote = '\0';
  size_t quote_at = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool escapes = c == '\\' && quote != '\'';
    if (escapes) {
      SMP_CHECK_WITH(ConfigError, i + 1 < text.size(), where,
                     "expected a character after the backslash at the end of: ", text,
                     ". Double it, or leave it out.");
      // Inside double quotes only these are special; elsewhere any character is taken as it is.
      if (quote == '"' && text[i + 1] != '"' && text[i + 1] != '\\') word += c;
      word += text[++i];
      in_word = true;
    } else if (quote != '\0') {
      if (c == quote) {
        quote = '\0';
      } else {
        word += c;
      }
    } else if (c == '\'' || c == '"') {
      quote = c;
      quote_at = i;
      in_word = true;
    } else if (c == ' ' || c == '\t' || c == '\n') {
      if (in_word) words.push_back(std::move(word));
      word.clear();
      in_word = false;
    } else {
      word += c;
      in_word = true;
    }
  }
  SMP_CHECK_WITH(ConfigError, quote == '\0', where, "the quote ", quote, " at character ",
                 quote_at + 1, " is not closed in: ", text, ". Close it.");
  if (in_word) words.push_back(std::move(word));
  return words;
}

std::string shell_quoted(const std::string& text) {
  const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=./:,@%+";
  if (!text.empty() && text.find_first_not_of(plain) == std::string::npos) return text;
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string shell_text(const LaunchCommand& command) {
  std::string line;
  for (const auto& [name, value] : command.environment) {
    line += name + "=" + shell_quoted(value) + " ";
  }
  for (size_t i = 0; i < command.arguments.size(); ++i) {
    line += (i > 0 ? " " : "") + shell_quoted(command.arguments[i]);
  }
  return line;
}

std::string signal_text(int signal) {
  return c10::str("signal ", signal, " (", strsignal(signal), ")");
}

std::string explain_exit(int exit_status) {
  const std::string text = c10::str("mpirun ended with exit status ", exit_status);
  const int signal = exit_status - 128;
  if (signal <= 0 || signal > 64) return text;
  return text + ", as it does when a rank is ended by " + signal_text(signal);
}

}  // namespace smp::tools
