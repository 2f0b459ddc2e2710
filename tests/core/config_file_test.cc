// SPDX-License-Identifier: Apache-2.0
// Where a configuration comes from: files, the environment, the program.

#include "core/config_file.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "smp/config.h"
#include "tests/core/config_errors.h"

namespace smp {
namespace {

using core::Distribution;
using core::kParametersVariable;
using core::Strategy;
using testing::BadValue;
using testing::error_of;
using testing::parse_error;

// A file in the test's own folder.
std::string write_file(const std::string& name, const std::string& text) {
  const std::string path = ::testing::TempDir() + name;
  std::ofstream(path) << text;
  return path;
}

class EnvironmentParameters {
 public:
  explicit EnvironmentParameters(const char* json) { setenv(kParametersVariable, json, 1); }
  ~EnvironmentParameters() { unsetenv(kParametersVariable); }
};

TEST(ConfigFile, MalformedJson) {
  EXPECT_EQ(
      parse_error("{\n  \"partitions\": 2,\n  \"microbatches\" 4\n}"),
      "[smp] smp.json: malformed JSON at line 3, column 18: syntax error while parsing object "
      "separator - unexpected number literal; expected ':'. Correct the text at that position.");
  EXPECT_NE(parse_error(R"({"seed": 1e999})").find("smp.json: a number is too large for JSON: "),
            std::string::npos);
  EXPECT_NE(parse_error("{\"seed\": " + std::string(300, '[') + std::string(300, ']') + "}")
                .find("smp.json: expected JSON of at most 256 levels, got more."),
            std::string::npos);
  EXPECT_EQ(parse_error("[1, 2]"),
            "[smp] smp.json: expected a JSON object with the parameters, got [1,2].");
  EXPECT_EQ(parse_error(R"({"partitions": 2, "partitions": 2})"),
            "[smp] smp.json: \"partitions\": expected each key once, got it twice in one object. "
            "Remove one of the two.");
  EXPECT_EQ(parse_error(R"({"mpi": {"enabled": true, "enabled": true}})"),
            "[smp] smp.json: \"mpi.enabled\": expected each key once, got it twice in one object. "
            "Remove one of the two.");
  EXPECT_EQ(
      error_of<ConfigError>([] { Config::from_file("no/such.json"); }),
      "[smp] no/such.json: cannot read the configuration file: No such file or directory. Give "
      "the path of a JSON file.");
  EXPECT_EQ(error_of<ConfigError>([] { Config::from_file("/"); }),
            "[smp] /: cannot read the configuration file: it is a folder. Give the path of a JSON "
            "file.");
}

TEST(ConfigFile, EstimatorForm) {
  const Distribution distribution = Distribution::from_json(
      R"({"smdistributed": {"modelparallel": {"enabled": true,
          "parameters": {"partitions": 2, "memory_weight": 2}}},
          "mpi": {"enabled": true, "processes_per_host": 4, "custom_mpi_options": "-x A"}})",
      "smp.json");
  EXPECT_EQ(distribution.config.partitions(), 2);
  EXPECT_EQ(distribution.processes_per_host, 4);
  EXPECT_EQ(distribution.custom_mpi_options, "-x A");
  EXPECT_EQ(distribution.parameters_json, R"({"memory_weight":2,"partitions":2})");
  EXPECT_EQ(
      error_of<ConfigError>([&] { distribution.config.validate(); }),
      "[smp] smp.json: \"smdistributed.modelparallel.parameters.memory_weight\": memory_weight "
      "must be between 0.0 and 1.0! (got 2)");
}

// Models of 10, 30 and 60 billion parameters, and of 65 with sharded data parallelism, as they are
// documented: each the `distribution` of an estimator, whole.
TEST(ConfigFile, DocumentedDistributions) {
  const std::string mpi =
      R"(, "mpi": {"enabled": true, "processes_per_host": 8, "custom_mpi_options":
           "--mca btl_vader_single_copy_mechanism none -x FI_EFA_USE_DEVICE_RDMA=1 )"
      R"(-x FI_PROVIDER=efa -x RDMAV_FORK_SAFE=1"}})";
  const auto distribution = [&](const std::string& parameters) {
    Distribution result = Distribution::from_json(
        R"({"smdistributed": {"modelparallel": {"enabled": true, "parameters": )" + parameters +
            "}}" + mpi,
        "smp.json");
    result.config.validate();
    EXPECT_EQ(result.strategy, Strategy::kModelParallel);
    EXPECT_EQ(result.processes_per_host, 8);
    EXPECT_EQ(result.custom_mpi_options,
              "--mca btl_vader_single_copy_mechanism none -x FI_EFA_USE_DEVICE_RDMA=1 -x "
              "FI_PROVIDER=efa -x RDMAV_FORK_SAFE=1");
    return result.config;
  };
  const Config of_10b = distribution(R"({"ddp": true, "tensor_parallel_degree": 4,
      "pipeline_parallel_degree": 1, "shard_optimizer_state": true, "prescaled_batch": true,
      "fp16": true, "fp16_params": true, "placement_strategy": "cluster", "optimize": "speed",
      "auto_partition": true, "default_partition": 0, "skip_tracing": true,
      "delayed_parameter_initialization": false})");
  EXPECT_EQ(of_10b.tensor_parallel_degree(), 4);
  EXPECT_TRUE(of_10b.shard_optimizer_state());
  const Config of_30b = distribution(R"({"ddp": true, "tensor_parallel_degree": 8,
      "pipeline_parallel_degree": 1, "prescaled_batch": true})");
  EXPECT_EQ(of_30b.tensor_parallel_degree(), 8);
  const Config of_60b = distribution(R"({"ddp": true, "tensor_parallel_degree": 8,
      "pipeline_parallel_degree": 2, "microbatches": 4, "active_microbatches": 2,
      "pipeline": "interleaved", "prescaled_batch": true, "offload_activations": true,
      "activation_loading_horizon": 4})");
  EXPECT_EQ(of_60b.partitions(), 2);
  EXPECT_EQ(of_60b.active_microbatches(), 2);
  const Config of_65b = distribution(R"({"ddp": true, "ddp_dist_backend": "auto",
      "tensor_parallel_degree": 8, "sharded_data_parallel_degree": 16, "bf16": true,
      "prescaled_batch": true, "sdp_reduce_bucket_size": 5e8,
      "sdp_param_persistence_threshold": 1e6, "sdp_max_live_parameters": 1e9,
      "sdp_hierarchical_allgather": false, "sdp_gradient_clipping": 1.0,
      "offload_activations": true})");
  EXPECT_EQ(of_65b.sharded_data_parallel_degree(), 16);
  EXPECT_EQ(of_65b.sdp_reduce_bucket_size(), 500000000);
}

TEST(ConfigFile, EstimatorFormOfDataParallelism) {
  const Distribution distribution = Distribution::from_json(
      R"({"smdistributed": {"dataparallel": {"enabled": true, "custom_mpi_options": "-x A"}}})",
      "smp.json");
  EXPECT_EQ(distribution.strategy, Strategy::kDataParallel);
  EXPECT_EQ(distribution.custom_mpi_options, "-x A");
  EXPECT_EQ(distribution.parameters_json, "");
  EXPECT_FALSE(distribution.config.is_set("partitions"));
}

TEST(ConfigFile, EstimatorErrors) {
  const BadValue kCases[] = {
      {R"({"smdistributed": true})",
       "\"smdistributed\": smdistributed strategy requires a dictionary (got true)"},
      {R"({"smdistributed": {"modelparallel": {}, "dataparallel": {}}})",
       "\"smdistributed\": Cannot use more than 1 smdistributed strategy. \nChoose one of the "
       "following supported strategies:['dataparallel', 'modelparallel']"},
      {R"({"smdistributed": {"tensorparallel": {}}})",
       "\"smdistributed\": Invalid smdistributed strategy provided: tensorparallel \nSupported "
       "strategies: ['dataparallel', 'modelparallel']"},
      {R"({"mpi": {"enabled": true}})",
       "\"smdistributed\": Invalid smdistributed strategy provided: none \nSupported strategies: "
       "['dataparallel', 'modelparallel']"},
      {R"({"smdistributed": {"dataparallel": {"enabled": true, "custom_options": ""}}})",
       "\"smdistributed.dataparallel.custom_options\": unknown key. Did you mean "
       "\"custom_mpi_options\"?"},
      {R"({"smdistributed": {"dataparallel": {"enabled": true, "custom_mpi_options": 1}}})",
       "\"smdistributed.dataparallel.custom_mpi_options\": expected a string with options of "
       "mpirun, got 1."},
      {R"({"smdistributed": {"modelparallel": 1}})",
       "\"smdistributed.modelparallel\": expected an object, got 1."},
      {R"({"smdistributed": {"modelparallel": {"enabled": false}}})",
       "\"smdistributed.modelparallel.enabled\": expected true, got false. Set it to true, or "
       "start "
       "the program without this file."},
      {R"({"smdistributed": {"modelparallel": {"enabled": true, "params": {}}}})",
       "\"smdistributed.modelparallel.params\": unknown key. Did you mean \"parameters\"?"},
      {R"({"smdistributed": {"modelparallel": {"enabled": true, "parameters": 3}}})",
       "\"smdistributed.modelparallel.parameters\": Expected a string path to an existing "
       "modelparallel config, or a dictionary. Received: 3."},
      {R"({"smdistributed": {"modelparallel": {"enabled": true}}, "mpi": {}})",
       "\"mpi.enabled\": expected true, got nothing. Ranks are started by MPI: set it to true."},
      {R"({"smdistributed": {"modelparallel": {"enabled": true}}, "mpi": []})",
       "\"mpi\": expected an object, got []."},
      {R"({"smdistributed": {"modelparallel": {"enabled": true}},
           "mpi": {"enabled": true, "processes_per_host": 0}})",
       "\"mpi.processes_per_host\": expected an integer >= 1, got 0. Set it to the number of "
       "ranks."},
      {R"({"smdistributed": {"modelparallel": {"enabled": true}},
           "mpi": {"enabled": true, "custom_mpi_options": ["-x"]}})",
       "\"mpi.custom_mpi_options\": expected a string with options of mpirun, got [\"-x\"]."},
      {R"({"smdistributed": {"modelparallel": {"enabled": true}}, "torch_distributed": {}})",
       "\"torch_distributed\": unknown key. Did you mean \"smdistributed\"?"},
  };
  for (const BadValue& bad : kCases) {
    EXPECT_EQ(parse_error(bad.json), std::string("[smp] smp.json: ") + bad.error);
  }
}

TEST(ConfigFile, ParametersInAFileOfTheirOwn) {
  const std::string outer = write_file(
      "outer.json",
      R"({"smdistributed": {"modelparallel": {"enabled": true, "parameters": "inner.json"}}})");
  const std::string inner = write_file("inner.json", R"({"partitions": 4})");
  EXPECT_EQ(Config::from_file(outer).partitions(), 4);
  EXPECT_EQ(Config::from_file(outer).source("partitions"), "inner.json");
  EXPECT_EQ(Config::from_file(inner).partitions(), 4);

  write_file("inner.json", "{");
  const std::string error = error_of<ConfigError>([&] { Config::from_file(outer); });
  EXPECT_NE(error.find("malformed JSON at line 1, column 2"), std::string::npos) << error;
  EXPECT_NE(error.find("\nCannot parse inner.json as a json file."), std::string::npos) << error;
  std::filesystem::remove(inner);
  EXPECT_EQ(error_of<ConfigError>([&] { Config::from_file(outer); }),
            "[smp] Expected a string path to an existing modelparallel config, or a dictionary. "
            "Received: inner.json.");
}

TEST(ConfigFile, EnvironmentThenFileThenProgram) {
  const EnvironmentParameters environment(R"({"microbatches": 8, "pipeline_parallel_degree": 4})");
  Config config =
      Config::from_json(R"({"microbatches": 4, "pipeline": "simple"})", "smp.json").microbatches(2);
  config.partitions(2).pipeline("interleaved").seed(5);
  EXPECT_EQ(config.microbatches(), 4);

  const Config merged = config.merged_with_environment();
  merged.validate();
  EXPECT_EQ(merged.microbatches(), 8);
  EXPECT_EQ(merged.source("microbatches"), "SM_HP_MP_PARAMETERS");
  EXPECT_EQ(merged.partitions(), 4);
  EXPECT_EQ(merged.pipeline(), "simple");
  EXPECT_EQ(merged.source("pipeline"), "smp.json");
  EXPECT_EQ(merged.seed(), 5);
  EXPECT_EQ(config.microbatches(), 4) << "the original is unchanged";

  EXPECT_EQ(merged.overridden(),
            (std::vector<std::string>{
                "SM_HP_MP_PARAMETERS sets \"partitions\" to 4; 2 from program is not used.",
                "SM_HP_MP_PARAMETERS sets \"microbatches\" to 8; 4 from smp.json is not used.",
                "SM_HP_MP_PARAMETERS sets \"microbatches\" to 8; 2 from program is not used.",
                "smp.json sets \"pipeline\" to \"simple\"; \"interleaved\" from program is not "
                "used."}));

  const std::string text = merged.to_string();
  const std::string margin(std::string("delayed_parameter_initialization").size(), ' ');
  const auto line = [&](const std::string& key, const std::string& rest) {
    return key + margin.substr(key.size()) + "  " + rest + "\n";
  };
  EXPECT_NE(text.find(line("microbatches",
                           "8             SM_HP_MP_PARAMETERS (overrides 4 from "
                           "smp.json, 2 from program)")),
            std::string::npos)
      << text;
  EXPECT_NE(text.find(line("ddp", "false         default")), std::string::npos) << text;
  std::ostringstream stream;
  stream << merged;
  EXPECT_EQ(stream.str(), text);
}

TEST(ConfigFile, ErrorsInTheEnvironmentNameIt) {
  const EnvironmentParameters environment(R"({"memory_weight": 7})");
  EXPECT_EQ(
      error_of<ConfigError>([] { Config().merged_with_environment().validate(); }),
      "[smp] SM_HP_MP_PARAMETERS: \"memory_weight\": memory_weight must be between 0.0 and 1.0! "
      "(got 7)");
}

}  // namespace
}  // namespace smp
