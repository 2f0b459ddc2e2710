// SPDX-License-Identifier: Apache-2.0
#include "smp/config.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "core/text.h"
#include "tests/core/config_errors.h"

namespace smp {
namespace {

using testing::BadValue;
using testing::error_of;
using testing::parse_error;
using testing::validation_error;

TEST(Config, Defaults) {
  const Config config;
  config.validate();
  EXPECT_EQ(config.partitions(), 1);
  EXPECT_EQ(config.microbatches(), 1);
  EXPECT_EQ(config.pipeline(), "interleaved");
  EXPECT_EQ(config.active_microbatches(), 3);
  EXPECT_EQ(config.optimize(), "memory");
  EXPECT_DOUBLE_EQ(config.memory_weight(), 0);
  EXPECT_EQ(config.placement_strategy(), "cluster");
  EXPECT_TRUE(config.auto_partition());
  EXPECT_EQ(config.default_partition(), 0);
  EXPECT_FALSE(config.ddp());
  EXPECT_EQ(config.ddp_port(), std::nullopt);
  EXPECT_EQ(config.graph_file(), std::nullopt);
  EXPECT_EQ(config.ddp_dist_backend(), "auto");
  EXPECT_FALSE(config.deterministic_server());
  EXPECT_EQ(config.gradient_shards(), 0);
  EXPECT_EQ(config.numerics(), "exact");
  EXPECT_EQ(config.input_source(), "all");
  EXPECT_EQ(config.seed(), -1);
  EXPECT_DOUBLE_EQ(config.timeout_seconds(), 300);
  EXPECT_DOUBLE_EQ(config.stall_seconds(), 60);
  EXPECT_DOUBLE_EQ(config.bucket_cap_mb(), 25);
  EXPECT_EQ(config.tensor_parallel_degree(), 1);
  EXPECT_EQ(config.sharded_data_parallel_degree(), 1);
  EXPECT_EQ(config.sdp_reduce_bucket_size(), 500000000);
  EXPECT_EQ(config.sdp_param_persistence_threshold(), 1000000);
  EXPECT_EQ(config.sdp_max_live_parameters(), 1000000000);
  EXPECT_TRUE(config.sdp_hierarchical_allgather());
  EXPECT_DOUBLE_EQ(config.sdp_gradient_clipping(), 1);
  EXPECT_EQ(config.source("partitions"), "default");
}

TEST(Config, DefaultsThatDependOnOthers) {
  EXPECT_EQ(Config().partitions(4).active_microbatches(), 6);
  EXPECT_EQ(Config().partitions(4).active_microbatches(2).active_microbatches(), 2);
}

TEST(Config, SettersChainAndTheLastOneCounts) {
  const Config config = Config()
                            .pipeline_parallel_degree(2)
                            .microbatches(4)
                            .microbatches(8)
                            .pipeline("simple")
                            .ddp(true)
                            .ddp_port(2222)
                            .graph_file("graph.json")
                            .timeout_seconds(1.5)
                            .set("seed", 7);
  config.validate();
  EXPECT_EQ(config.partitions(), 2);
  EXPECT_EQ(config.pipeline_parallel_degree(), 2);
  EXPECT_EQ(config.microbatches(), 8);
  EXPECT_EQ(config.pipeline(), "simple");
  EXPECT_EQ(config.ddp_port(), 2222);
  EXPECT_EQ(config.graph_file(), "graph.json");
  EXPECT_DOUBLE_EQ(config.timeout_seconds(), 1.5);
  EXPECT_EQ(config.seed(), 7);
  EXPECT_EQ(config.source("microbatches"), "program");
}

TEST(Config, AcceptsEveryValueThatThisVersionHas) {
  for (const char* json : {
           R"({"partitions": 2, "pipeline_parallel_degree": 2})",
           R"({"pipeline": "simple"})",
           R"({"deterministic_server": true})",
           R"({"placement_strategy": "spread"})",
           R"({"placement_strategy": "PTD"})",
           R"({"guard": "first_step"})",
           R"({"guard": 10})",
           R"({"guard": "10"})",
           R"({"memory_weight": 0})",
           R"({"memory_weight": 1.0})",
           R"({"ddp": true, "ddp_dist_backend": "auto", "ddp_port": 0})",
           R"({"sharded_data_parallel_degree": 2, "ddp": true})",
           R"({"sdp_reduce_bucket_size": 5e8, "sdp_param_persistence_threshold": 0})",
           R"({"sdp_max_live_parameters": 1, "sdp_hierarchical_allgather": false})",
           R"({"sdp_gradient_clipping": 2})",
           R"({"tensor_parallel_degree": 1, "sharded_data_parallel_degree": 1, "fp16": false})",
           R"({"contiguous": true, "horovod": false})",
           R"({"auto_partition": true, "default_partition": 0})",
           R"({"auto_partition": false, "default_partition": 0})",
           R"({"partitions": 2, "default_partition": 1})",
           R"({"partition_file": "plan.json"})",
           R"({"pipeline": "file", "schedule_file": "mine.csv"})",
           R"({"pipeline": "breadth_first", "virtual_stages": 3})",
           R"({"pipeline": "zbv", "virtual_stages": 2})",
           R"({"partition_file": "plan.json", "load_partition": true})",
           R"({"memory_limit_mb": 512, "optimizer_state_factor": 0})",
           R"({"trace_execution_times": false, "trace_memory_usage": true})",
           R"({"skip_tracing": true})",
       }) {
    EXPECT_EQ(validation_error(json), "") << json;
  }
}

TEST(Config, WrongValues) {
  const BadValue kCases[] = {
      {R"({"microbatches": 0})",
       R"("microbatches": The number of microbatches must be a positive integer. (got 0))"},
      {R"({"microbatches": "four"})",
       R"("microbatches": The number of microbatches must be a positive integer. (got "four"))"},
      {R"({"microbatches": 2.5})",
       R"("microbatches": The number of microbatches must be a positive integer. (got 2.5))"},
      {R"({"microbatches": true})",
       R"("microbatches": The number of microbatches must be a positive integer. (got true))"},
      {R"({"partitions": -1})",
       R"("partitions": The number of partitions must be a positive integer. (got -1))"},
      {R"({"pipeline_parallel_degree": 0})",
       R"("pipeline_parallel_degree": The number of pipeline_parallel_degree must be a positive integer. (got 0))"},
      {R"({"active_microbatches": 0})",
       R"("active_microbatches": The number of active_microbatches must be a positive integer. (got 0))"},
      {R"({"pipeline": "2f2b"})",
       R"("pipeline": pipeline must be a value in: ['simple', 'interleaved', '1f1b', )"
       R"('eager_1f1b', 'interleaved_1f1b', 'breadth_first', 'zb_h1', 'zb_h2', 'zbv', )"
       R"('dualpipe_v', 'list', 'auto', 'file', '_only_forward']. (got "2f2b"))"},
      {R"({"optimize": 1})",
       R"("optimize": optimize must be a value in: ['memory', 'speed']. (got 1))"},
      {R"({"placement_strategy": "DDP"})",
       R"("placement_strategy": placement_strategy must be a value in: ['cluster', 'spread', 'DPT', 'DTP', 'PDT', 'PTD', 'TDP', 'TPD']. (got "DDP"))"},
      {R"({"ddp": 1})", R"("ddp": ddp must be a value in: [true, false]. (got 1))"},
      {R"({"deterministic_server": null})",
       R"("deterministic_server": deterministic_server must be a value in: [true, false]. (got null))"},
      {R"({"memory_weight": 1.5})",
       R"("memory_weight": memory_weight must be between 0.0 and 1.0! (got 1.5))"},
      {R"({"memory_weight": "half"})",
       R"("memory_weight": memory_weight must be between 0.0 and 1.0! (got "half"))"},
      {R"({"ddp": true, "ddp_port": -1})",
       R"("ddp_port": Invalid port number -1. (expected an integer from 0 to 65535))"},
      {R"({"ddp": true, "ddp_port": 65536})",
       R"("ddp_port": Invalid port number 65536. (expected an integer from 0 to 65535))"},
      {R"({"load_partition": true})",
       R"("load_partition": needs "partition_file", the file to load. Give its path.)"},
      {R"({"memory_limit_mb": -1})",
       R"("memory_limit_mb": expected a number from 0 to 1000000000, got -1.)"},
      {R"({"activation_checkpointing": "auto"})",
       R"("activation_checkpointing": 'auto' needs "memory_limit_mb", the limit to keep. Set it.)"},
      {R"({"activation_loading_horizon": 0})",
       R"("activation_loading_horizon": expected an integer from 1 to 1000000, got 0.)"},
      {R"({"pipeline": "file"})",
       R"("pipeline": 'file' needs "schedule_file", the schedule to load. Give its path.)"},
      {R"({"schedule_file": "mine.csv"})",
       R"("schedule_file": is loaded with "pipeline": "file" only. Set that, or leave the file out.)"},
      {R"({"pipeline": "zbv", "virtual_stages": 3})",
       R"("virtual_stages": the schedule 'zbv' needs two for each rank, got 3. Leave it out, or choose another "pipeline".)"},
      {R"({"pipeline": "zb_h1", "virtual_stages": 2})",
       R"("virtual_stages": the schedule 'zb_h1' needs one for each rank, got 2. Leave it out, or choose another "pipeline".)"},
      {R"({"partition_file": 3})", R"("partition_file": 'partition_file' must be a str. (got 3))"},
      {R"({"guard": "never"})",
       R"("guard": guard must be 'every_step', 'first_step', 'every_microbatch' or a positive integer. (got "never"))"},
      {R"({"guard": 0})",
       R"("guard": guard must be 'every_step', 'first_step', 'every_microbatch' or a positive integer. (got 0))"},
      {R"({"guard": "-3"})",
       R"("guard": guard must be 'every_step', 'first_step', 'every_microbatch' or a positive integer. (got "-3"))"},
      {R"({"gradient_shards": -1})",
       R"("gradient_shards": expected an integer from 0 to 1000000, got -1.)"},
      {R"({"gradient_shards": 4294967296})",
       R"("gradient_shards": expected an integer from 0 to 1000000, got 4294967296.)"},
      {R"({"virtual_stages": 2147483648})",
       R"("virtual_stages": expected an integer from 0 to 1000, got 2147483648.)"},
      {R"({"active_microbatches": 4294967296})",
       R"("active_microbatches": expected an integer from 1 to 1000000, got 4294967296.)"},
      {R"({"microbatches": 1000000000000000000})",
       R"("microbatches": expected an integer from 1 to 1000000, got 1000000000000000000.)"},
      {R"({"partitions": 5e9})",
       R"("partitions": expected an integer from 1 to 1000000, got 5000000000.0.)"},
      {R"({"seed": [1]})", R"("seed": expected an integer >= -1, got [1].)"},
      {R"({"seed": 18446744073709551615})",
       R"("seed": expected an integer >= -1, got 18446744073709551615.)"},
      {R"({"timeout_seconds": 0})",
       R"("timeout_seconds": expected a number > 0 and <= 1000000000, got 0.)"},
      {R"({"timeout_seconds": 1e17})",
       R"("timeout_seconds": expected a number > 0 and <= 1000000000, got 1e+17.)"},
      {R"({"bucket_cap_mb": {}})",
       R"("bucket_cap_mb": expected a number > 0 and <= 1000000000, got {}.)"},
  };
  for (const BadValue& bad : kCases) {
    EXPECT_EQ(validation_error(bad.json), std::string("[smp] smp.json: ") + bad.error);
  }
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(
      error_of<ConfigError>([&] { Config().timeout_seconds(infinity).validate(); }),
      "[smp] program: \"timeout_seconds\": expected a number > 0 and <= 1000000000, got inf.");
}

TEST(Config, LongTextsAreShortened) {
  const std::string x(100000, 'x');
  const std::string shown = std::string(99, 'x') + "... (100002 bytes)";
  EXPECT_EQ(
      validation_error("{\"optimize\": \"" + x + "\"}"),
      "[smp] smp.json: \"optimize\": optimize must be a value in: ['memory', 'speed']. (got \"" +
          shown + ")");
  EXPECT_EQ(validation_error("{\"seed\": \"" + x + "\"}"),
            "[smp] smp.json: \"seed\": expected an integer >= -1, got \"" + shown + ".");
  const std::string key = std::string(100, 'x') + "... (100000 bytes)";
  EXPECT_EQ(validation_error("{\"" + x + "\": 1}").find("[smp] smp.json: \"" + key + "\": unknown"),
            0u);
  EXPECT_LT(parse_error("[\"" + x + "\"]").size(), 300u);
  EXPECT_LT(parse_error(x).size(), 400u);
  EXPECT_LT(parse_error("{\"smdistributed\": \"" + x + "\"}").size(), 300u);
}

TEST(Config, ManyMistakesAreCounted) {
  std::string text = "{";
  for (int i = 0; i < 1000; ++i) text += (i == 0 ? "\"k" : ", \"k") + std::to_string(i) + "\": 1";
  const std::string error = validation_error(text + "}");
  EXPECT_EQ(error.find("[smp] the configuration has 1000 errors:\n  smp.json: \"k0\": unknown"),
            0u);
  EXPECT_EQ(error.substr(error.rfind('\n')), "\n  and 900 more");
  EXPECT_EQ(parse_error(text + ", \"k1000\": 1}"),
            "[smp] smp.json: expected at most 1000 parameters, got 1001. Give an object with "
            "the parameters alone.");
}

TEST(Config, EnumsAreTheStrings) {
  EXPECT_EQ(Config().pipeline(Config::Pipeline::kSimple).pipeline(), "simple");
  EXPECT_EQ(Config().pipeline(Config::Pipeline::kInterleaved1f1b).pipeline(), "interleaved_1f1b");
  EXPECT_EQ(Config().pipeline(Config::Pipeline::kFile).pipeline(), "file");
  EXPECT_EQ(Config().optimize(Config::Optimize::kSpeed).optimize(), "speed");
  EXPECT_EQ(Config().numerics(Config::Numerics::kFast).numerics(), "fast");
  EXPECT_EQ(Config().placement_strategy(Config::PlacementStrategy::kTPD).placement_strategy(),
            "TPD");
  EXPECT_EQ(Config().guard(Config::Guard::kFirstStep).guard(), "first_step");
  EXPECT_EQ(Config().guard(10).guard(), "10");
  EXPECT_EQ(Config()
                .activation_checkpointing(Config::ActivationCheckpointing::kAuto)
                .activation_checkpointing(),
            "auto");
  EXPECT_EQ(Config().tensor_parallelism(Config::TensorParallelism::kMarked).tensor_parallelism(),
            "marked");
}

TEST(Config, CopiesAreIndependent) {
  const Config first = Config().microbatches(4);
  Config second = first;
  second.microbatches(8);
  EXPECT_EQ(first.microbatches(), 4);
  EXPECT_EQ(second.microbatches(), 8);
}

TEST(Config, GettersRefuseWrongValuesToo) {
  EXPECT_EQ(
      error_of<ConfigError>([] { Config().microbatches(0).microbatches(); }),
      "[smp] program: \"microbatches\": The number of microbatches must be a positive integer. "
      "(got 0)");
  EXPECT_EQ(error_of<ConfigError>([] { Config().get("microbatch"); }),
            "[smp] config key \"microbatch\": unknown parameter. Did you mean \"microbatches\"?");
}

TEST(Config, FeaturesOfTensorFlowAreRefusedByName) {
  const BadValue kCases[] = {
      {R"({"contiguous": false})",
       R"("contiguous": false is TensorFlow-only, and this library is for libtorch. Use true (the default).)"},
      {R"({"horovod": true})",
       R"("horovod": true is TensorFlow-only, and this library is for libtorch. Use false (the default).)"},
  };
  for (const BadValue& bad : kCases) {
    EXPECT_EQ(validation_error(bad.json), std::string("[smp] smp.json: ") + bad.error);
  }
}

TEST(Config, UnknownKeys) {
  EXPECT_EQ(validation_error(R"({"micro_batches": 4})"),
            "[smp] smp.json: \"micro_batches\": unknown parameter. Did you mean \"microbatches\"?");
  EXPECT_EQ(validation_error(R"({"pipeline_paralel_degree": 4})"),
            "[smp] smp.json: \"pipeline_paralel_degree\": unknown parameter. Did you mean "
            "\"pipeline_parallel_degree\"?");
  EXPECT_EQ(
      validation_error(R"({"static_mode": true})"),
      "[smp] smp.json: \"static_mode\": an undocumented key of some SMP 1.x scripts, which has "
      "no meaning here. Remove it.");
  EXPECT_EQ(error_of<ConfigError>([] { Config().set("partition", 2).validate(); }),
            "[smp] program: \"partition\": unknown parameter. Did you mean \"partitions\"?");
}

bool mentions(const std::string& json, const std::string& line) {
  const std::string error = validation_error(json);
  return error.find("\n  smp.json: " + line) != std::string::npos ||
         error == "[smp] smp.json: " + line;
}

TEST(Config, RulesBetweenParameters) {
  EXPECT_EQ(
      validation_error(R"({"partitions": 2, "pipeline_parallel_degree": 4})"),
      "[smp] smp.json: \"pipeline_parallel_degree\": another name of \"partitions\": expected 2, "
      "as there, got 4. Give one of the two.");
  EXPECT_EQ(validation_error(R"({"ddp_port": 2222})"),
            "[smp] smp.json: \"ddp_port\": `ddp_port` needs `ddp` to be set as well");
  EXPECT_EQ(
      validation_error(R"({"ddp_dist_backend": "auto", "ddp": false})"),
      "[smp] smp.json: \"ddp_dist_backend\": `ddp_dist_backend` needs `ddp` to be set as well");
  EXPECT_EQ(validation_error(R"({"shard_optimizer_state": true})"),
            "[smp] smp.json: \"shard_optimizer_state\": `shard_optimizer_state` needs `ddp` to be "
            "set as well");
  EXPECT_EQ(validation_error(R"({"shard_optimizer_state": true, "ddp": true})"), "");
  EXPECT_TRUE(
      mentions(R"({"auto_partition": false})",
               "\"auto_partition\": default_partition must be supplied if auto_partition is "
               "set to False!"));
  EXPECT_TRUE(mentions(R"({"partitions": 2, "default_partition": 2})",
                       "\"default_partition\": default_partition must be less than the number of "
                       "partitions! (got 2 with 2 partitions)"));
  EXPECT_TRUE(mentions(R"({"ddp": true, "horovod": true})",
                       "\"horovod\": 'ddp' and 'horovod' cannot be simultaneously enabled."));
  EXPECT_TRUE(mentions(R"({"tensor_parallel_degree": 2})",
                       "\"tensor_parallel_degree\": `tensor_parallel_degree` > 1 needs `ddp` to be "
                       "set as well"));
  EXPECT_TRUE(mentions(R"({"sharded_data_parallel_degree": 2, "shard_optimizer_state": true})",
                       "\"sharded_data_parallel_degree\": a degree of 2 needs "
                       "\"shard_optimizer_state\" to be false, got true."));
  EXPECT_TRUE(mentions(
      R"({"sharded_data_parallel_degree": 2, "gradient_accumulation_fusion": true})",
      "\"sharded_data_parallel_degree\": a degree of 2 needs \"gradient_accumulation_fusion\" to "
      "be false, got true."));
  EXPECT_EQ(
      validation_error(R"({"tensor_parallel_degree": 2, "ddp": true, "prescaled_batch": true})"),
      "");
  EXPECT_EQ(validation_error(R"({"tensor_parallel_degree": 2, "ddp": true, "graph_file": "a",
                                 "partition_file": "b"})"),
            "");
  // The documented configurations of models of 10 and of 65 billion parameters.
  EXPECT_EQ(validation_error(R"({"tensor_parallel_degree": 4, "pipeline_parallel_degree": 1,
                                 "ddp": true, "shard_optimizer_state": true,
                                 "prescaled_batch": true, "fp16": true})"),
            "");
  EXPECT_EQ(validation_error(R"({"tensor_parallel_degree": 8, "ddp": true, "bf16": true,
                                 "sharded_data_parallel_degree": 16, "offload_activations": true,
                                 "sdp_gradient_clipping": 1.0})"),
            "");
  EXPECT_EQ(validation_error(R"({"tensor_parallelism": "some"})"),
            "[smp] smp.json: \"tensor_parallelism\": tensor_parallelism must be a value in: "
            "['auto', 'marked']. (got \"some\")");
  EXPECT_TRUE(mentions(R"({"bf16": true, "fp16": true})",
                       "\"bf16\": FP16 and BF16 cannot be simultaneously enabled."));
  EXPECT_EQ(validation_error(R"({"bf16": true})"), "");
  EXPECT_EQ(validation_error(R"({"fp16": true, "partitions": 2})"), "");
  EXPECT_EQ(validation_error(R"({"fp16": true, "fp16_params": true})"), "");
  EXPECT_EQ(validation_error(R"({"fp16_params": false})"), "");
  for (const char* alone : {R"({"fp16_params": true})", R"({"fp16_params": true, "bf16": true})"}) {
    EXPECT_EQ(validation_error(alone),
              "[smp] smp.json: \"fp16_params\": needs \"fp16\" to be true, which gives optimizers "
              "masters of float32, too. For float16 without masters leave both out, and make the "
              "modules under smp::model_creation with dtype(torch::kHalf).");
  }
}

TEST(Config, AllMistakesAreReportedTogether) {
  EXPECT_EQ(validation_error(R"({"micro_batches": 4, "memory_weight": 1.5, "ddp_port": 1})"),
            "[smp] the configuration has 3 errors:\n"
            "  smp.json: \"micro_batches\": unknown parameter. Did you mean \"microbatches\"?\n"
            "  smp.json: \"memory_weight\": memory_weight must be between 0.0 and 1.0! (got 1.5)\n"
            "  smp.json: \"ddp_port\": `ddp_port` needs `ddp` to be set as well");
  EXPECT_EQ(
      Config::from_json(R"({"partitions": 0, "default_partition": 9})", "f").problems().size(), 1u)
      << "a rule that needs a wrong value is skipped";
}

TEST(Config, JsonRoundTripAndFingerprint) {
  const Config config = Config().partitions(2).microbatches(4).ddp(true).timeout_seconds(60);
  const Config again = Config::from_json(config.to_json(), "again");
  again.validate();
  EXPECT_EQ(again.to_json(), config.to_json());
  EXPECT_EQ(Config().to_json(),
            R"({"activation_checkpointing":"modules","activation_loading_horizon":4,)"
            R"("active_microbatches":3,"auto_partition":true,"bf16":false,"bucket_cap_mb":25.0,)"
            R"("check_collectives":false,"cost_model":"auto","cuda_graphs":"off","ddp":false,)"
            R"("default_partition":0,"delayed_parameter_initialization":true,)"
            R"("deterministic":false,"deterministic_server":false,"fp16":false,)"
            R"("fp16_params":false,)"
            R"("gradient_accumulation_fusion":false,"gradient_shards":0,)"
            R"("guard":"every_step","input_source":"all",)"
            R"("keep_freed_memory":true,"load_partition":false,"memory_limit_mb":0.0,)"
            R"("memory_weight":0.0,"microbatches":1,"numerics":"exact",)"
            R"("offload_activations":false,"optimize":"memory",)"
            R"("optimizer_state_factor":2.0,"partitions":1,"pipeline":"interleaved",)"
            R"("placement_strategy":"cluster","preempt_seconds":0.0,"prescaled_batch":false,)"
            R"("recovery":"off","recovery_interval":0,"replay_check":0,)"
            R"("sdp_gradient_clipping":1.0,)"
            R"("sdp_hierarchical_allgather":true,"sdp_max_live_parameters":1000000000,)"
            R"("sdp_param_persistence_threshold":1000000,"sdp_reduce_bucket_size":500000000,)"
            R"("seed":-1,"shard_optimizer_state":false,"sharded_data_parallel_degree":1,)"
            R"("skip_tracing":false,"stall_seconds":60.0,"strict_tensor_parallelism":false,)"
            R"("tensor_parallel_degree":1,"tensor_parallelism":"auto",)"
            R"("timeout_seconds":300.0,"trace_execution_times":true,)"
            R"("trace_memory_usage":false,"virtual_stages":0})");
  Config::from_json(Config().to_json(), "defaults").validate();

  EXPECT_EQ(Config::from_json(R"({"guard": 10})", "f").guard(), "10");
  // The same values by other routes are the same configuration; another value is another one.
  const Config spelled = Config::from_json(
      R"({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": true, "timeout_seconds": 60,
          "fp16": false, "optimize": "memory"})",
      "f");
  EXPECT_EQ(spelled.fingerprint(), config.fingerprint());
  EXPECT_NE(Config(config).microbatches(5).fingerprint(), config.fingerprint());
}

}  // namespace
}  // namespace smp
