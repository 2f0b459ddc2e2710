#include "tools/launch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "tests/core/error_text.h"
#include "tools/config_doc.h"

namespace smp::tools {
namespace {

using smp::testing::error_text;
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

TEST(Launch, DryRunTextCanBePasted) {
  const LaunchOptions options = options_for(R"({"partitions": 2})");
  EXPECT_EQ(shell_text(plan_launch(options, {})),
            "SM_HP_MP_PARAMETERS='{\"partitions\":2}' mpirun -np 2 --oversubscribe --bind-to none "
            "--mca orte_abort_on_non_zero_status 1 --mca btl_vader_single_copy_mechanism none -x "
            "SM_HP_MP_PARAMETERS ./train --np 7 'a b'");
}

TEST(Launch, TellsProgramsThatOutputIsNoTerminal) {
  LaunchContext context;
  context.output_is_terminal = false;
  const auto command = plan_launch(options_for(R"({"partitions": 2})"), context);
  const std::pair<std::string, std::string> dumb{"TERM", "dumb"};
  EXPECT_NE(std::find(command.environment.begin(), command.environment.end(), dumb),
            command.environment.end());
}

TEST(Launch, NumberOfRanks) {
  LaunchOptions options = options_for(R"({"partitions": 4})");
  EXPECT_EQ(rank_count(options), "4");
  options = options_for(estimator(R"(, "processes_per_host": 8)", R"({"partitions": 4})"));
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
  EXPECT_EQ(error_text([&] { plan_launch(options, context); }),
            "[smp] smprun: both --config " + options.config_file +
                " and the environment variable SM_HP_MP_PARAMETERS are set: expected one of them. "
                "Unset SM_HP_MP_PARAMETERS, or leave --config out.");
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

TEST(Launch, Errors) {
  const auto error_of = [](const LaunchOptions& options) {
    return error_text([&] { plan_launch(options, {}); });
  };
  LaunchOptions options = options_for(R"({"microbatches": 4})");
  const std::string start = "[smp] " + options.config_file + ": ";
  EXPECT_EQ(error_of(options), start +
                                   "'partitions' is a required parameter. Set it to the number of "
                                   "pipeline partitions.");
  options = options_for(R"({"partitions": 0})");
  EXPECT_EQ(error_of(options),
            start + "\"partitions\": The number of partitions must be a positive integer. (got 0)");
  options = options_for(R"({"partitions": 3})");
  options.np = 8;
  EXPECT_EQ(
      error_of(options),
      "[smp] config key \"partitions\": expected a divisor of the world size (8), got 3. Set it "
      "to 1, 2, 4 or 8.");
  options = options_for(estimator(R"(, "custom_mpi_options": "-x 'A")", R"({"partitions": 2})"));
  EXPECT_EQ(error_of(options),
            start +
                "\"mpi.custom_mpi_options\": the quote ' at character 4 is not closed in: -x 'A. "
                "Close it.");
  options = options_for(R"({"smdistributed": {"modelparallel": {}, "dataparallel": {}}})");
  EXPECT_NE(error_of(options).find("Cannot use more than 1 smdistributed strategy. \n"),
            std::string::npos);
  EXPECT_EQ(error_of(LaunchOptions{}),
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
  EXPECT_EQ(error_text([] { split_options("a \"b", "w: "); }),
            "[smp] w: the quote \" at character 3 is not closed in: a \"b. Close it.");
  EXPECT_EQ(error_text([] { split_options("a\\", "w: "); }),
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

TEST(ConfigurationPage, IsUpToDate) {
  std::ifstream in("docs/configuration.md");
  ASSERT_TRUE(in) << "docs/configuration.md is missing";
  const std::string committed(std::istreambuf_iterator<char>(in), {});
  EXPECT_EQ(committed, configuration_page())
      << "run: bazel run //tools:config_doc > docs/configuration.md";
}

}  // namespace
}  // namespace smp::tools
