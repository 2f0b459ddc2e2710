// SPDX-License-Identifier: Apache-2.0
#include "tools/launch.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <thread>

#include "tests/error_of.h"
#include "tools/config_texts.h"

namespace smp::tools {
namespace {

using smp::testing::error_of;
using smp::testing::expect_has;
using Words = std::vector<std::string>;

std::string config_file(const std::string& text) {
  const std::string path = ::testing::TempDir() + "smp.json";
  std::ofstream(path) << text;
  return path;
}

LaunchOptions options_for(const std::string& config) {
  LaunchOptions options;
  options.config_file = config_file(config);
  options.program = {"./train", "--np", "7", "a b"};
  return options;
}

std::string estimator(const std::string& mpi, const std::string& parameters) {
  return R"({"smdistributed": {"modelparallel": {"enabled": true, "parameters": )" + parameters +
         R"(}}, "mpi": {"enabled": true)" + mpi + "}}";
}

std::string rank_count(const LaunchOptions& options) {
  return plan_launch(options, {}).arguments.at(2);
}

TEST(Launch, Command) {
  LaunchOptions options = options_for(R"({"partitions": 2, "microbatches": 4})");
  options.tag_output = true;
  LaunchContext context;
  context.is_root = true;
  context.failure_dir = "/tmp/x";
  const LaunchCommand command = plan_launch(options, context);
  EXPECT_EQ(command.arguments, (Words{"mpirun",
                                      "-np",
                                      "2",
                                      "--oversubscribe",
                                      "--bind-to",
                                      "none",
                                      "--allow-run-as-root",
                                      "--tag-output",
                                      "--mca",
                                      "orte_abort_on_non_zero_status",
                                      "1",
                                      "--mca",
                                      "btl_vader_single_copy_mechanism",
                                      "none",
                                      "--mca",
                                      "btl",
                                      "vader,self",
                                      "--mca",
                                      "orte_tmpdir_base",
                                      "/tmp/x",
                                      "-x",
                                      "SMP_FAILURE_DIR",
                                      "-x",
                                      "SM_HP_MP_PARAMETERS",
                                      "./train",
                                      "--np",
                                      "7",
                                      "a b"}));
  using Variables = std::vector<std::pair<std::string, std::string>>;
  EXPECT_EQ(command.environment,
            (Variables{{"SMP_FAILURE_DIR", "/tmp/x"},
                       {"SM_HP_MP_PARAMETERS", R"({"microbatches":4,"partitions":2})"}}));
}

/// The same happens when a job goes on with fewer ranks.
TEST(Launch, InAnotherLayout) {
  LaunchContext context;
  context.recovery_dir = "/dev/shm/x";
  context.layout = Layout{2, 2, 8, 4, 1};
  const auto parameters = [&](LaunchOptions options) {
    const LaunchCommand command = plan_launch(options, context);
    EXPECT_EQ(command.ranks, 2);
    EXPECT_EQ(command.arguments.at(2), "2");
    EXPECT_EQ(command.environment.at(0),
              std::make_pair(std::string("SMP_RECOVERY_DIR"), std::string("/dev/shm/x")));
    EXPECT_EQ(command.environment.at(1).first, "SM_HP_MP_PARAMETERS");
    return command.environment.at(1).second;
  };
  EXPECT_EQ(parameters(options_for(estimator(R"(, "processes_per_host": 4)",
                                             R"({"partitions": 2, "microbatches": 4})"))),
            R"({"gradient_shards":4,"microbatches":8,"partitions":2})");
  LaunchOptions alone;  // the program brings its own
  alone.np = 4;
  alone.program = {"./train"};
  EXPECT_EQ(parameters(alone), R"({"gradient_shards":4,"microbatches":8,"partitions":2})");
}

TEST(Launch, DryRunTextCanBePasted) {
  const LaunchOptions options = options_for(R"({"partitions": 2})");
  EXPECT_EQ(
      shell_text(plan_launch(options, {})),
      "SM_HP_MP_PARAMETERS='{\"partitions\":2}' mpirun -np 2 --oversubscribe --bind-to none "
      "--mca orte_abort_on_non_zero_status 1 --mca btl_vader_single_copy_mechanism none --mca "
      "btl vader,self -x SM_HP_MP_PARAMETERS ./train --np 7 'a b'");
}

TEST(Launch, TellsProgramsThatOutputIsNoTerminal) {
  LaunchContext context;
  context.output_is_terminal = false;
  const auto command = plan_launch(options_for(R"({"partitions": 2})"), context);
  const std::pair<std::string, std::string> dumb{"TERM", "dumb"};
  EXPECT_NE(std::find(command.environment.begin(), command.environment.end(), dumb),
            command.environment.end());
}

TEST(Launch, StacksOfCrashesAreLeftOutUnlessAskedFor) {
  LaunchContext context;
  const LaunchOptions options = options_for(R"({"partitions": 2})");
  const std::pair<std::string, std::string> none{"OMPI_MCA_opal_signal", ""};
  const auto has_none = [&] {
    const auto variables = plan_launch(options, context).environment;
    return std::find(variables.begin(), variables.end(), none) != variables.end();
  };
  EXPECT_FALSE(has_none());
  context.backtraces = false;
  EXPECT_TRUE(has_none());
}

TEST(Launch, RanksComputeWithOneThreadUnlessTheUserSaysOtherwise) {
  LaunchContext context;
  context.one_thread = true;
  const auto parameters = R"({"partitions": 2})";
  expect_has(shell_text(plan_launch(options_for(parameters), context)), "OMP_NUM_THREADS=1 ");
  const auto custom =
      options_for(estimator(R"(, "custom_mpi_options": "-x OMP_NUM_THREADS=4")", parameters));
  EXPECT_EQ(shell_text(plan_launch(custom, context)).find("OMP_NUM_THREADS=1 "), std::string::npos);
}

/// The text of the command has `words` in a row.
bool has(const LaunchCommand& command, const std::string& words) {
  return (" " + shell_text(command) + " ").find(" " + words + " ") != std::string::npos;
}

/// Ranks that all are on this host need no network, and MPI's shared memory lies with the job's.
TEST(Launch, OnThisHostOnly) {
  const char* const kMemory = "--mca btl_vader_backing_directory /dev/shm/job";
  LaunchContext context;
  context.memory_dir = "/dev/shm/job";
  LaunchOptions options = options_for(R"({"partitions": 2, "ddp": true})");
  EXPECT_TRUE(has(plan_launch(options, context), "--mca btl vader,self"));
  EXPECT_TRUE(has(plan_launch(options, context), kMemory));
  EXPECT_TRUE(plan_launch(options, context).shows_arrivals);
  const auto expect_hosts = [&](const LaunchOptions& where) {
    const LaunchCommand command = plan_launch(where, context);
    EXPECT_FALSE(has(command, "--mca btl vader,self")) << shell_text(command);
    EXPECT_FALSE(has(command, kMemory)) << shell_text(command);
    EXPECT_FALSE(command.shows_arrivals);
  };
  options.hosts = "h1:2";
  expect_hosts(options);
  context.host_name = "h1.cluster";  // set in a job of SLURM with one host
  EXPECT_TRUE(has(plan_launch(options, context), kMemory));
  options.hosts = "h1:2,h2:2";
  expect_hosts(options);
  expect_hosts(options_for(
      estimator(R"(, "custom_mpi_options": "--hostfile hosts")", R"({"partitions": 2})")));
  context.mpirun_knows_hosts = true;  // set in a job of PBS
  expect_hosts(options_for(R"({"partitions": 2})"));
}

TEST(Launch, ParametersOfMpiInTheEnvironmentWin) {
  LaunchContext context;
  context.failure_dir = "/tmp/x";
  context.mpi_parameters = {"btl", "btl_vader_single_copy_mechanism", "orte_local_tmpdir_base"};
  const LaunchCommand command = plan_launch(options_for(R"({"partitions": 2})"), context);
  EXPECT_FALSE(has(command, "--mca btl vader,self")) << shell_text(command);
  EXPECT_FALSE(has(command, "--mca btl_vader_single_copy_mechanism none")) << shell_text(command);
  EXPECT_FALSE(has(command, "--mca orte_tmpdir_base /tmp/x")) << "which excludes the local one";
  EXPECT_TRUE(has(command, "--mca orte_abort_on_non_zero_status 1")) << shell_text(command);
}

TEST(Launch, TimeUntilAllRanksAreThere) {
  LaunchOptions options = options_for(R"({"partitions": 2})");
  const auto limit = [&] { return start_limit(options, plan_launch(options, {})).count(); };
  EXPECT_EQ(limit(), 600);
  options.start_timeout = 0;
  EXPECT_EQ(limit(), 0);
  options = options_for(R"({"partitions": 2, "timeout_seconds": 1000})");
  EXPECT_EQ(limit(), 2000);
  options.start_timeout = 30;
  EXPECT_EQ(limit(), 30);
}

/// SIGTERM to all processes of a job, as SLURM sends it, leaves it to the launcher to end mpirun.
TEST(Launch, WithATimeToStop) {
  EXPECT_FALSE(plan_launch(options_for(R"({"partitions": 2})"), {}).outlives_sigterm);
  const auto command = plan_launch(options_for(R"({"partitions": 2, "preempt_seconds": 30})"), {});
  EXPECT_TRUE(command.outlives_sigterm);
  EXPECT_EQ(command.config.preempt_seconds(), 30);
}

TEST(Launch, NumberOfRanks) {
  LaunchOptions options = options_for(R"({"partitions": 4})");
  EXPECT_EQ(rank_count(options), "4");
  options =
      options_for(estimator(R"(, "processes_per_host": 8)", R"({"partitions": 4, "ddp": true})"));
  EXPECT_EQ(rank_count(options), "8");
  options.np = 16;
  EXPECT_EQ(rank_count(options), "16");
  options.config_file.clear();
  const LaunchCommand bare = plan_launch(options, {});
  EXPECT_EQ(bare.arguments.at(2), "16");
  EXPECT_TRUE(bare.environment.empty()) << "the program brings its own configuration";
}

TEST(Launch, ParametersOfTheEnvironment) {
  LaunchOptions options;
  options.program = {"p"};
  LaunchContext context;
  context.parameters = R"({"pipeline_parallel_degree": 3})";
  EXPECT_EQ(plan_launch(options, context).arguments.at(2), "3");
  options.config_file = config_file(R"({"partitions": 2})");
  EXPECT_EQ(error_of<ConfigError>([&] { plan_launch(options, context); }),
            "[smp] smprun: both --config " + options.config_file +
                " and the environment variable SM_HP_MP_PARAMETERS are set: expected one of them. "
                "Unset SM_HP_MP_PARAMETERS, or leave --config out.");
}

// The content is there whenever the job is started.
TEST(Launch, APipeIsReadOnce) {
  LaunchOptions options;
  options.program = {"./train"};
  options.config_file = ::testing::TempDir() + "smp.pipe";
  std::remove(options.config_file.c_str());
  ASSERT_EQ(mkfifo(options.config_file.c_str(), 0600), 0);
  std::thread writer([&] { std::ofstream(options.config_file) << R"({"partitions": 3})"; });
  read_config_pipe(options);
  writer.join();
  EXPECT_EQ(rank_count(options), "3");
  EXPECT_EQ(rank_count(options), "3");
  EXPECT_EQ(plan_launch(options, {}).environment,
            (std::vector<std::pair<std::string, std::string>>{
                {"SM_HP_MP_PARAMETERS", R"({"partitions":3})"}}));

  LaunchOptions file = options_for(R"({"partitions": 2})");
  read_config_pipe(file);
  EXPECT_FALSE(file.config_text);
  std::remove(file.config_file.c_str());
  read_config_pipe(file);
  EXPECT_EQ(error_of<ConfigError>([&] { plan_launch(file, {}); }),
            "[smp] " + file.config_file +
                ": cannot read the configuration file: No such file or directory. Give the path "
                "of a JSON file.");
}

TEST(Launch, CustomOptionsComeAfterOursAndReplaceThem) {
  const LaunchOptions options = options_for(
      estimator(R"(, "custom_mpi_options": "-x 'A=b c' --mca btl_vader_single_copy_mechanism cma )"
                "-bind-to core $(touch oops)\"",
                R"({"partitions": 2})"));
  EXPECT_EQ(plan_launch(options, {}).arguments, (Words{"mpirun",
                                                       "-np",
                                                       "2",
                                                       "--oversubscribe",
                                                       "--mca",
                                                       "orte_abort_on_non_zero_status",
                                                       "1",
                                                       "--mca",
                                                       "btl",
                                                       "vader,self",
                                                       "-x",
                                                       "A=b c",
                                                       "--mca",
                                                       "btl_vader_single_copy_mechanism",
                                                       "cma",
                                                       "-bind-to",
                                                       "core",
                                                       "$(touch",
                                                       "oops)",
                                                       "-x",
                                                       "SM_HP_MP_PARAMETERS",
                                                       "./train",
                                                       "--np",
                                                       "7",
                                                       "a b"}));
}

TEST(Launch, SeveralHosts) {
  LaunchOptions options = options_for(R"({"partitions": 2, "ddp": true})");
  options.hosts = "h1:2,h2:4";
  Words arguments = plan_launch(options, {}).arguments;
  arguments.resize(6);
  EXPECT_EQ(arguments, (Words{"mpirun", "-np", "6", "--oversubscribe", "--host", "h1:2,h2:4"}));
  options.np = 4;
  EXPECT_EQ(rank_count(options), "4");
  options =
      options_for(estimator(R"(, "processes_per_host": 3)", R"({"partitions": 3, "ddp": true})"));
  options.hosts = "h1,h2:6";
  EXPECT_EQ(plan_launch(options, {}).arguments.at(5), "h1:3,h2:6");
  for (const char* bad : {"h1:0", "h1:two", ":2", "h1,,h2"}) {
    SCOPED_TRACE(bad);
    options.hosts = bad;
    expect_has(error_of<ConfigError>([&] { plan_launch(options, {}); }),
               "--hosts: expected HOST or HOST:RANKS, separated by commas, got");
  }
}

/// On each of the hosts that are left, once.
TEST(Launch, ProbesHostsAndRemovesFoldersThere) {
  LaunchOptions options = options_for(estimator(
      R"(, "custom_mpi_options": "--map-by ppr:2:node --prefix /mpi -x A -mca plm_rsh_agent x")",
      R"({"partitions": 2, "ddp": true})"));
  options.hosts = "h1:2,h2:4,h3:2";
  LaunchContext context;
  context.recovery_dir = "/dev/shm/x";
  const auto from = [](Words words, const std::string& first) {
    return Words(std::find(words.begin(), words.end(), first), words.end());
  };
  const Words on_all = {"mpirun", "-np", "3", "--oversubscribe", "--host", "h1:1,h2:1,h3:1"};
  const auto all = hosts_of(options, context);
  Words removal = plan_removal(options, context, all).arguments;
  EXPECT_EQ(removal.front(), "timeout");
  EXPECT_EQ(from(removal, "rm"), (Words{"rm", "-rf", "/dev/shm/x"}));
  removal = from(removal, "mpirun");
  removal.resize(6);
  EXPECT_EQ(removal, on_all);
  Words probe = plan_probe(options, context, all).arguments;
  EXPECT_EQ(from(probe, "true"), Words{"true"});
  EXPECT_EQ(from(probe, "--prefix"),
            (Words{"--prefix", "/mpi", "-mca", "plm_rsh_agent", "x", "true"}));
  for (const char* word : {"--map-by", "-x"}) EXPECT_EQ(from(probe, word), Words{}) << word;
  probe = from(probe, "mpirun");
  probe.resize(6);
  EXPECT_EQ(probe, on_all);
  context.lost_hosts = {"h2"};
  options.np = 4;
  EXPECT_EQ(to_string(hosts_of(options, context)), "h1:2,h3:2");
  EXPECT_EQ(plan_launch(options, context).arguments.at(5), "h1:2,h3:2");
}

TEST(Launch, HostsOfASlurmJob) {
  EXPECT_EQ(to_string(slurm_hosts("n[01-03,7],login", "2(x3),1,4")),
            "n01:2,n02:2,n03:2,n7:1,login:4");
  EXPECT_EQ(to_string(slurm_hosts("gpu9", "")), "gpu9:1");
  EXPECT_EQ(to_string(slurm_hosts("a[9-11]b", "1(x3)")), "a9b:1,a10b:1,a11b:1");
  EXPECT_EQ(to_string(slurm_hosts("n[2147483647]", "")), "n2147483647:1");
  for (const auto& [nodes, tasks] : {std::pair{"n[1-", "1"},
                                     {"n[2-1]", "1"},
                                     {"n[x]", "1"},
                                     {"n[1-]", "1"},
                                     {"n[99999999999999999999]", "1"},
                                     {"n1", "two"},
                                     {"n1", "2(x2)"},
                                     {"n1", "-1"}}) {
    SCOPED_TRACE(c10::str(nodes, " ", tasks));
    const auto text = error_of<ConfigError>([&, n = nodes, t = tasks] { slurm_hosts(n, t); });
    expect_has(text, ". Name the hosts with --hosts HOST:RANKS,...");
  }
  LaunchContext context;
  context.slurm_hosts = slurm_hosts("n[1-2]", "2(x2)");
  LaunchOptions options = options_for(R"({"partitions": 2, "ddp": true})");
  EXPECT_EQ(plan_launch(options, context).arguments.at(2), "4");
  EXPECT_EQ(plan_launch(options, context).arguments.at(5), "n1:2,n2:2");
  options.hosts = "h1:2";
  EXPECT_EQ(plan_launch(options, context).arguments.at(5), "h1:2") << "the user's hosts win";
}

/// The configurations of docs/memory.md and docs/tensor_parallelism.md say nothing of partitions.
TEST(Launch, PartitionsAreNotRequired) {
  LaunchOptions sharded =
      options_for(R"({"microbatches": 1, "ddp": true, "sharded_data_parallel_degree": 4})");
  EXPECT_EQ(rank_count(sharded), "4");
  sharded.np = 8;
  EXPECT_EQ(rank_count(sharded), "8");
  sharded.np = 6;
  EXPECT_EQ(
      error_of<ConfigError>([&] { plan_launch(sharded, {}); }),
      "[smp] config key \"sharded_data_parallel_degree\": expected a divisor of the number of "
      "replicas (6), got 4. Set it to 1, 2, 3 or 6.");
  EXPECT_EQ(rank_count(options_for(R"({"ddp": true, "tensor_parallel_degree": 2})")), "2");
  EXPECT_EQ(
      rank_count(options_for(R"({"partitions": 2, "ddp": true, "tensor_parallel_degree": 2})")),
      "4");
  const auto too_many = [](const LaunchOptions& options) {
    return error_of<ConfigError>([&] { plan_launch(options, {}); });
  };
  const std::string most =
      " ranks: expected at most 1048576. Set smaller degrees or mpi.processes_per_host, or give "
      "--np N.";
  EXPECT_EQ(too_many(options_for(R"({"ddp": true, "tensor_parallel_degree": 100000,
                                     "sharded_data_parallel_degree": 100000})")),
            "[smp] smprun: the configuration asks for 10000000000" + most);
  EXPECT_EQ(too_many(options_for(estimator(R"(, "processes_per_host": 2000000)", "{}"))),
            "[smp] smprun: the configuration asks for 2000000" + most);
  LaunchOptions other = options_for(R"({"microbatches": 4, "ddp": false})");
  other.np = 4;
  EXPECT_EQ(rank_count(other), "4") << "the program may set partitions";
  EXPECT_EQ(rank_count(options_for(estimator(R"(, "processes_per_host": 3)", "{}"))), "3");
}

TEST(Launch, DataParallelism) {
  LaunchOptions options = options_for(
      R"({"smdistributed": {"dataparallel": {"enabled": true, "custom_mpi_options": "-x A"}}})");
  EXPECT_EQ(error_of<ConfigError>([&] { plan_launch(options, {}); }),
            "[smp] smprun: the number of ranks is unknown: the dataparallel strategy needs --np N, "
            "--hosts HOST:RANKS,... or mpi.processes_per_host. Give one of them.");
  options.np = 3;
  LaunchCommand command = plan_launch(options, {});
  EXPECT_EQ(command.arguments.at(2), "3");
  expect_has(shell_text(command), " -x A -x MASTER_ADDR -x MASTER_PORT ./train");
  using Variables = std::vector<std::pair<std::string, std::string>>;
  EXPECT_EQ(command.environment,
            (Variables{{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}}));
  options.hosts = "h1:2,h2:2";
  LaunchContext context;
  context.master_port = "7";
  EXPECT_EQ(plan_launch(options, context).environment,
            (Variables{{"MASTER_ADDR", "h1"}, {"MASTER_PORT", "7"}}));
}

TEST(Launch, Errors) {
  const auto error = [](const LaunchOptions& options) {
    return error_of<ConfigError>([&] { plan_launch(options, {}); });
  };
  LaunchOptions options = options_for(R"({"microbatches": 4})");
  const std::string start = "[smp] " + options.config_file + ": ";
  EXPECT_EQ(error(options),
            "[smp] smprun: the number of ranks is unknown: the configuration has none of "
            "\"partitions\", \"tensor_parallel_degree\", \"sharded_data_parallel_degree\" and "
            "mpi.processes_per_host. Give --np N.");
  options = options_for(R"({"partitions": 0})");
  EXPECT_EQ(error(options),
            start + "\"partitions\": The number of partitions must be a positive integer. (got 0)");
  options = options_for(R"({"partitions": 3})");
  options.np = 8;
  EXPECT_EQ(
      error(options),
      "[smp] config key \"partitions\": expected a divisor of the world size (8), got 3. Set it "
      "to 1, 2, 4 or 8.");
  options.np = 6;
  EXPECT_EQ(rank_count(options), "6") << "the program may set ddp";
  options = options_for(R"({"partitions": 3, "ddp": false})");
  options.np = 6;
  EXPECT_EQ(error(options),
            "[smp] config key \"ddp\": expected true, because 6 ranks are 2 replicas of 3 "
            "partitions, got false. Set \"ddp\": true, or start 3 ranks.");
  options = options_for(estimator(R"(, "custom_mpi_options": "-x 'A")", R"({"partitions": 2})"));
  EXPECT_EQ(error(options),
            start +
                "\"mpi.custom_mpi_options\": the quote ' at character 4 is not closed in: -x 'A. "
                "Close it.");
  options = options_for(R"({"smdistributed": {"modelparallel": {}, "dataparallel": {}}})");
  expect_has(error(options), "Cannot use more than 1 smdistributed strategy. \n");
  EXPECT_EQ(error(LaunchOptions{}),
            "[smp] smprun: the number of ranks is unknown: expected --np N or --config FILE, got "
            "neither. Give one of them.");
}

TEST(Launch, SplitsOptionsLikeAShell) {
  EXPECT_EQ(split_options("", "w: "), Words{});
  EXPECT_EQ(split_options("  -a\t--b=c \n d ", "w: "), (Words{"-a", "--b=c", "d"}));
  EXPECT_EQ(split_options(R"('a "b' "c 'd" e\ f g"h i"j '' "")", "w: "),
            (Words{"a \"b", "c 'd", "e f", "gh ij", "", ""}));
  EXPECT_EQ(split_options(R"("a\"b\\c\d" 'e\f' \$HOME)", "w: "),
            (Words{R"(a"b\c\d)", R"(e\f)", "$HOME"}));
  EXPECT_EQ(error_of<ConfigError>([] { split_options("a \"b", "w: "); }),
            "[smp] w: the quote \" at character 3 is not closed in: a \"b. Close it.");
  EXPECT_EQ(error_of<ConfigError>([] { split_options("a\\", "w: "); }),
            "[smp] w: expected a character after the backslash at the end of: a\\. Double it, or "
            "leave it out.");
}

TEST(Launch, QuotingIsUndoneBySplitting) {
  for (const char* word :
       {"plain", "", "a b", "it's", "$HOME `x` \\ \"q\"", "new\nline", "^openib"}) {
    EXPECT_EQ(split_options(shell_quoted(word), ""), Words{word});
  }
  EXPECT_EQ(shell_quoted("it's"), "'it'\\''s'");
}

TEST(Launch, ExplainsExitStatus) {
  EXPECT_EQ(explain_exit(3), "mpirun ended with exit status 3");
  EXPECT_EQ(explain_exit(139),
            "mpirun ended with exit status 139, as it does when a rank is ended by signal 11 "
            "(Segmentation fault)");
}

std::string committed(const std::string& path) {
  std::ifstream in(path);
  EXPECT_TRUE(in) << path << " is missing";
  return std::string(std::istreambuf_iterator<char>(in), {});
}

TEST(ConfigurationFiles, AreUpToDate) {
  EXPECT_EQ(committed("docs/configuration.md"), configuration_page())
      << "run: bazel run //tools:config_files";
  EXPECT_EQ(committed("smp/config.h"), config_header(committed("smp/config.h")))
      << "run: bazel run //tools:config_files";
}

TEST(ConfigurationFiles, ThePageBeginsWithWhatMattersAndLinksToPages) {
  const std::string page = configuration_page();
  const auto position = [&](const std::string& text) {
    EXPECT_NE(page.find(text), std::string::npos) << text;
    return page.find(text);
  };
  EXPECT_LT(
      position("| [`tensor_parallel_degree`](#tensor_parallel_degree) | `1` | Among how many "
               "ranks layers are divided (see [tensor parallelism](tensor_parallelism.md)) |"),
      position("## Pipelines\n\n### `partitions`\n"));
  EXPECT_LT(position("### `virtual_stages`\n"), position("## Ranks and replicas\n"));
  EXPECT_LT(position("## Ranks and replicas\n"), position("### `ddp`\n"));
  EXPECT_EQ(page.find("docs/"), std::string::npos);  // names of files that are no links
}

}  // namespace
}  // namespace smp::tools
