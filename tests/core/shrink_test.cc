// SPDX-License-Identifier: Apache-2.0
#include "tools/shrink.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace smp::tools {
namespace {

/// The layouts that follow each other when a job fails again and again.
std::vector<std::string> layouts(const std::string& json, int ranks) {
  std::vector<std::string> texts;
  std::string now = json;
  while (const auto layout = shrink(Config::from_json(now, "test"), ranks)) {
    EXPECT_LT(layout->ranks, ranks);
    texts.push_back(layout->to_text());
    ranks = layout->ranks;
    now = layout->put_into(now);
  }
  return texts;
}

using Texts = std::vector<std::string>;

TEST(Shrink, ReplicasFirstThenStages) {
  EXPECT_EQ(layouts(R"({"partitions": 2, "microbatches": 3, "ddp": true})", 8),
            (Texts{"4 ranks: 2 stages x 2 replicas, 6 microbatches",
                   "2 ranks: 2 stages x 1 replica, 12 microbatches",
                   "1 rank: 1 stage x 1 replica, 12 microbatches"}));
  EXPECT_EQ(layouts(R"({"pipeline_parallel_degree": 3, "microbatches": 1})", 3),
            (Texts{"2 ranks: 2 stages x 1 replica, 1 microbatch",
                   "1 rank: 1 stage x 1 replica, 1 microbatch"}));
  EXPECT_EQ(layouts(R"({"partitions": 1, "microbatches": 2, "ddp": true})", 6),
            (Texts{"3 ranks: 1 stage x 3 replicas, 4 microbatches",
                   "1 rank: 1 stage x 1 replica, 12 microbatches"}));
}

TEST(Shrink, KeepsTheGroupsThatDivideLayers) {
  const char* config =
      R"({"partitions": 2, "microbatches": 2, "ddp": true, "tensor_parallel_degree": 2})";
  EXPECT_EQ(layouts(config, 8), (Texts{"4 ranks: 2 stages x 2 parts x 1 replica, 4 microbatches",
                                       "2 ranks: 1 stage x 2 parts x 1 replica, 4 microbatches"}));
}

/// The sums of gradients are those of the layout that the job was started with.
TEST(Shrink, KeepsTheShardsOfGradients) {
  const auto shards = [](const std::string& json, int ranks) {
    return shrink(Config::from_json(json, "test"), ranks)->gradient_shards;
  };
  EXPECT_EQ(shards(R"({"partitions": 1, "ddp": true})", 4), 4);
  EXPECT_EQ(shards(R"({"partitions": 1, "ddp": true, "gradient_shards": 8})", 4), 8);
  const std::string tensor = R"({"ddp": true, "tensor_parallel_degree": 2)";
  EXPECT_EQ(shards(tensor + "}", 4), 4);
  EXPECT_EQ(shards(tensor + R"(, "prescaled_batch": true})", 4), 2);
}

TEST(Shrink, WhereNothingSmallerIsTheSame) {
  // The program names its stages.
  EXPECT_EQ(layouts(R"({"partitions": 2, "auto_partition": false, "default_partition": 0,
                        "ddp": true})",
                    4),
            Texts{"2 ranks: 2 stages x 1 replica, 2 microbatches"});
  // Sharded over two replicas at least.
  EXPECT_EQ(layouts(R"({"sharded_data_parallel_degree": 2, "ddp": true})", 4),
            Texts{"2 ranks: 1 stage x 2 replicas, 2 microbatches"});
  EXPECT_FALSE(shrink(Config(), 1));
}

TEST(Shrink, LeavesOtherParametersAlone) {
  const Layout layout{2, 2, 8, 4, 1};
  EXPECT_EQ(nlohmann::json::parse(layout.put_into(
                R"({"pipeline_parallel_degree": 4, "microbatches": 4, "bf16": true})")),
            nlohmann::json::parse(
                R"({"partitions": 2, "microbatches": 8, "gradient_shards": 4, "bf16": true})"));
}

}  // namespace
}  // namespace smp::tools
