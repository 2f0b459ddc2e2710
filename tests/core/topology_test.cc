// SPDX-License-Identifier: Apache-2.0
#include "core/topology.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/error_of.h"

namespace smp {
namespace {

using testing::error_of;
using Groups = std::vector<std::vector<int>>;

/// The topology of ranks of which every `local_size` consecutive ones share a host.
core::Topology in_blocks(const Config& config, int world_size, int local_size) {
  std::vector<std::string> hosts;
  for (int rank = 0; rank < world_size; ++rank) {
    hosts.push_back("host" + std::to_string(rank / local_size));
  }
  return {config, hosts};
}

std::string digits(const core::Topology& topology, CommGroup group) {
  std::string text;
  for (int rank = 0; rank < topology.size(); ++rank) {
    text += std::to_string(topology.rank_in(group, rank));
  }
  return text;
}

/// All groups of a kind, ordered by their first member.
Groups groups(const core::Topology& topology, CommGroup group) {
  Groups all;
  for (int rank = 0; rank < topology.size(); ++rank) {
    if (topology.rank_in(group, rank) == 0) all.push_back(topology.members(group, rank));
  }
  return all;
}

// The table of both editions of the guide for 8 ranks with pp = tp = rdp = 2.
TEST(Topology, PlacementTable) {
  struct Row {
    const char* strategy;
    const char *pp, *tp, *rdp, *dp, *mp;
  };
  const Row kRows[] = {
      {"DPT", "00110011", "01010101", "00001111", "01012323", "01230123"},
      {"cluster", "00110011", "01010101", "00001111", "01012323", "01230123"},
      {"TPD", "00110011", "00001111", "01010101", "01012323", "00112233"},
      {"spread", "00110011", "00001111", "01010101", "01012323", "00112233"},
      {"DTP", "01010101", "00110011", "00001111", "00112233", "01230123"},
      {"TDP", "01010101", "00001111", "00110011", "00112233", "01012323"},
      {"PTD", "00001111", "00110011", "01010101", "01230123", "00112233"},
      {"PDT", "00001111", "01010101", "00110011", "01230123", "01012323"},
  };
  for (const Row& row : kRows) {
    const Config config = Config().partitions(2).tensor_parallel_degree(2).ddp(true);
    const core::Topology topology =
        in_blocks(Config(config).placement_strategy(row.strategy), 8, 8);
    EXPECT_EQ(digits(topology, CommGroup::kPp), row.pp) << row.strategy;
    EXPECT_EQ(digits(topology, CommGroup::kTp), row.tp) << row.strategy;
    EXPECT_EQ(digits(topology, CommGroup::kRdp), row.rdp) << row.strategy;
    EXPECT_EQ(digits(topology, CommGroup::kDp), row.dp) << row.strategy;
    EXPECT_EQ(digits(topology, CommGroup::kMp), row.mp) << row.strategy;
    EXPECT_EQ(digits(topology, CommGroup::kWorld), "01234567");
  }
}

TEST(Topology, WithoutTensorParallelism) {
  const Config two = Config().partitions(2).ddp(true);
  const core::Topology spread = in_blocks(Config(two).placement_strategy("spread"), 8, 8);
  EXPECT_EQ(groups(spread, CommGroup::kMp), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(groups(spread, CommGroup::kDp), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  const core::Topology cluster = in_blocks(two, 8, 8);
  EXPECT_EQ(groups(cluster, CommGroup::kMp), (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(groups(cluster, CommGroup::kDp), (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}}));
  EXPECT_EQ(groups(cluster, CommGroup::kRdp), groups(cluster, CommGroup::kDp));
  EXPECT_EQ(groups(cluster, CommGroup::kPp), groups(cluster, CommGroup::kMp));

  const Config four = Config().partitions(4).ddp(true);
  const core::Topology spread4 = in_blocks(Config(four).placement_strategy("spread"), 8, 8);
  EXPECT_EQ(groups(spread4, CommGroup::kMp), (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}}));
  EXPECT_EQ(groups(in_blocks(four, 8, 8), CommGroup::kMp), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
}

// For every kind of group: the groups divide the world, have the documented sizes, and a rank
// finds itself at its own position.
TEST(Topology, GroupsDivideTheWorld) {
  const Config config = Config().partitions(3).tensor_parallel_degree(2).ddp(true);
  for (const char* strategy : {"DPT", "DTP", "PDT", "PTD", "TDP", "TPD"}) {
    const core::Topology topology = in_blocks(Config(config).placement_strategy(strategy), 24, 4);
    EXPECT_EQ(topology.pp_size(), 3);
    EXPECT_EQ(topology.tp_size(), 2);
    EXPECT_EQ(topology.rdp_size(), 4);
    EXPECT_EQ(topology.size(CommGroup::kMp), 6);
    EXPECT_EQ(topology.size(CommGroup::kDp), 8);
    for (CommGroup group : {CommGroup::kWorld, CommGroup::kPp, CommGroup::kTp, CommGroup::kRdp,
                            CommGroup::kMp, CommGroup::kDp}) {
      std::vector<int> all;
      for (const auto& ranks : groups(topology, group)) {
        EXPECT_EQ(static_cast<int>(ranks.size()), topology.size(group));
        EXPECT_TRUE(std::is_sorted(ranks.begin(), ranks.end()));
        for (size_t i = 0; i < ranks.size(); ++i) {
          EXPECT_EQ(topology.rank_in(group, ranks[i]), static_cast<int>(i));
          EXPECT_EQ(topology.members(group, ranks[i]), ranks);
          all.push_back(ranks[i]);
        }
      }
      std::sort(all.begin(), all.end());
      EXPECT_EQ(all, topology.members(CommGroup::kWorld, 0)) << to_string(group);
    }
  }
}

// The digits of the placement, taken from a number in mixed radix by hand.
TEST(Topology, AxesAreTheDigitsOfThePlacement) {
  const Config config =
      Config().partitions(2).tensor_parallel_degree(3).ddp(true).sharded_data_parallel_degree(2);
  for (const std::string strategy : {"DPT", "DTP", "PDT", "PTD", "TDP", "TPD"}) {
    const core::Topology topology = in_blocks(Config(config).placement_strategy(strategy), 24, 8);
    for (int rank = 0; rank < 24; ++rank) {
      int rest = rank;
      for (int i = 2; i >= 0; --i) {
        const CommGroup group = strategy[i] == 'P'   ? CommGroup::kPp
                                : strategy[i] == 'T' ? CommGroup::kTp
                                                     : CommGroup::kRdp;
        const core::Axis axis = topology.axis(group);
        EXPECT_EQ(axis.size, topology.size(group));
        EXPECT_EQ(axis.index_of(rank), rest % axis.size) << strategy << rank;
        EXPECT_EQ(topology.rank_in(group, rank), rest % axis.size);
        EXPECT_EQ(topology.axes({strategy[i]}).members(rank), topology.members(group, rank));
        rest /= axis.size;
      }
      EXPECT_EQ(topology.pieces().index_of(rank), topology.rank_in(CommGroup::kRdp, rank) % 2);
      for (const int other : topology.axes("PD").members(rank)) {
        EXPECT_EQ(topology.rank_in(CommGroup::kTp, other), topology.rank_in(CommGroup::kTp, rank));
      }
      EXPECT_EQ(topology.axes("PD").size(), 8);
    }
  }
  const core::Topology alike = in_blocks(Config().tensor_parallel_degree(2).ddp(true), 8, 8);
  EXPECT_EQ(alike.pieces(), alike.axis(CommGroup::kRdp));
}

TEST(Topology, OneRank) {
  const core::Topology topology = in_blocks(Config(), 1, 1);
  EXPECT_EQ(topology.size(), 1);
  EXPECT_EQ(topology.dp_rank(0), 0);
  EXPECT_EQ(topology.members(CommGroup::kMp, 0), std::vector<int>{0});
}

TEST(Topology, LocalRanks) {
  const Config config = Config().partitions(2).ddp(true);
  const core::Topology blocks = in_blocks(config, 6, 4);
  EXPECT_EQ(blocks.local_rank(3), 3);
  EXPECT_EQ(blocks.local_rank(5), 1);
  EXPECT_EQ(blocks.local_size(0), 4);
  EXPECT_EQ(blocks.local_size(5), 2);
  const core::Topology hosts(config, {"a", "b", "a", "b"});
  EXPECT_EQ(hosts.local_rank(2), 1);
  EXPECT_EQ(hosts.local_rank(1), 0);
  EXPECT_EQ(hosts.local_size(3), 2);
}

TEST(Topology, LeastSize) {
  EXPECT_EQ(core::Topology::least_size(Config()), 1);
  EXPECT_EQ(core::Topology::least_size(Config().partitions(3).tensor_parallel_degree(2)), 6);
  EXPECT_EQ(core::Topology::least_size(
                Config().tensor_parallel_degree(2).sharded_data_parallel_degree(4)),
            8);
}

TEST(Topology, Errors) {
  EXPECT_EQ(error_of<UsageError>([] { core::Topology::check_size(Config(), 0); }),
            "[smp] Topology: expected at least one rank, got 0.");
  EXPECT_EQ(
      error_of<ConfigError>([] { in_blocks(Config().partitions(3), 8, 8); }),
      "[smp] config key \"partitions\": expected a divisor of the world size (8), got 3. Set it "
      "to 1, 2, 4 or 8.");
  EXPECT_EQ(error_of<ConfigError>([] { in_blocks(Config().partitions(2), 1, 1); }),
            "[smp] config key \"partitions\": expected a divisor of the world size (1), got 2. Set "
            "it to 1, or start 2 ranks: smprun --np 2 PROGRAM.");
  EXPECT_EQ(
      error_of<ConfigError>(
          [] { in_blocks(Config().partitions(100000).tensor_parallel_degree(100000), 1, 1); }),
      "[smp] config key \"partitions\": expected a divisor of the world size (1), got 100000. "
      "Set it to 1.");
  EXPECT_EQ(
      error_of<ConfigError>([] { in_blocks(Config().tensor_parallel_degree(4), 1, 1); }),
      "[smp] config key \"tensor_parallel_degree\": expected a divisor of world size / partitions "
      "(1), got 4. Set it to 1, or start 4 ranks: smprun --np 4 PROGRAM.");
  EXPECT_EQ(
      error_of<ConfigError>([] { in_blocks(Config().partitions(4), 2, 2); }),
      "[smp] config key \"partitions\": expected a divisor of the world size (2), got 4. Set it "
      "to 1 or 2.");
  EXPECT_EQ(error_of<ConfigError>([] {
              in_blocks(Config().partitions(2).tensor_parallel_degree(3).ddp(true), 8, 8);
            }),
            "[smp] config key \"tensor_parallel_degree\": expected a divisor of world size / "
            "partitions (4), got 3. Set it to 1, 2 or 4.");
  EXPECT_EQ(
      error_of<ConfigError>(
          [] { in_blocks(Config().sharded_data_parallel_degree(3).ddp(true), 4, 4); }),
      "[smp] config key \"sharded_data_parallel_degree\": expected a divisor of the number of "
      "replicas (4), got 3. Set it to 1, 2 or 4.");
  EXPECT_EQ(
      error_of<ConfigError>([] {
        in_blocks(Config().tensor_parallel_degree(2).sharded_data_parallel_degree(4).ddp(true), 4,
                  4);
      }),
      "[smp] config key \"sharded_data_parallel_degree\": expected a divisor of the number of "
      "replicas (2), got 4. Set it to 1 or 2.");
  EXPECT_EQ(
      error_of<ConfigError>([] { in_blocks(Config().partitions(2), 8, 8); }),
      "[smp] config key \"ddp\": expected true, because 8 ranks are 4 replicas of 2 partitions, "
      "got false. Set \"ddp\": true, or start 2 ranks.");
  EXPECT_EQ(
      error_of<ConfigError>([] { in_blocks(Config(), 2, 2); }),
      "[smp] config key \"ddp\": expected true, because 2 ranks are 2 replicas of 1 partition, "
      "got false. Set \"ddp\": true, or start 1 rank.");
  EXPECT_EQ(error_of<UsageError>([] { in_blocks(Config(), 1, 1).rank_in(CommGroup::kPp, 1); }),
            "[smp] Topology: expected a rank from 0 to 0, got 1.");
  EXPECT_EQ(error_of<UsageError>([] { in_blocks(Config(), 0, 1); }),
            "[smp] Topology: expected at least one rank, got 0.");
}

}  // namespace
}  // namespace smp
