// SPDX-License-Identifier: Apache-2.0
#include "core/topology.h"

#include <algorithm>
#include <cstdio>
#include <ostream>

#include "core/check.h"

namespace smp {

const char* to_string(CommGroup group) {
  switch (group) {
    case CommGroup::kWorld:
      return "world";
    case CommGroup::kPp:
      return "pp";
    case CommGroup::kTp:
      return "tp";
    case CommGroup::kRdp:
      return "rdp";
    case CommGroup::kMp:
      return "mp";
    case CommGroup::kDp:
      return "dp";
  }
  SMP_INTERNAL_ASSERT(false, "unknown group");
}

}  // namespace smp

namespace smp::core {
namespace {

// "1, 2, 4 or 8"
std::string divisors(int number) {
  std::vector<int> all;
  for (int i = 1; i <= number; ++i) {
    if (number % i == 0) all.push_back(i);
  }
  std::string text;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i > 0) text += i + 1 == all.size() ? " or " : ", ";
    text += std::to_string(all[i]);
  }
  return text;
}

// `remedy`: a cure other than another degree.
void check_divisor(const char* key, int64_t degree, const char* whole_name, int whole,
                   const std::string& remedy) {
  SMP_CHECK_WITH(ConfigError, degree <= whole && whole % degree == 0, "config key \"", key,
                 "\": expected a divisor of ", whole_name, " (", whole, "), got ", degree,
                 ". Set it to ", divisors(whole), remedy, ".");
}

// A program that runs alone was most likely started without a launcher.
std::string launcher_hint(const Config& config, int world_size) {
  if (world_size > 1) return "";
  const int64_t ranks = Topology::least_size(config);
  if (ranks > Topology::kMostRanks) return "";
  return c10::str(", or start ", ranks, " ranks: smprun --np ", ranks, " PROGRAM");
}

void check_replicas(const Config& config, int world_size) {
  const int64_t ranks = config.partitions() * config.tensor_parallel_degree();
  SMP_CHECK_WITH(ConfigError, config.ddp() || world_size == ranks,
                 "config key \"ddp\": expected true, because ", world_size, " ranks are ",
                 world_size / ranks, " replicas of ", ranks, " partition", ranks == 1 ? "" : "s",
                 ", got false. Set \"ddp\": true, or start ", ranks, " rank", ranks == 1 ? "" : "s",
                 ".");
}

// The letters of the digits, most significant first.
std::string letters(const std::string& strategy) {
  if (strategy == "cluster") return "DPT";
  if (strategy == "spread") return "TPD";
  return strategy;
}

std::vector<std::string> blocks_of(int world_size, int local_size) {
  SMP_CHECK_WITH(UsageError, world_size >= 1 && local_size >= 1,
                 "Topology: expected a world size and a local size >= 1, got ", world_size, " and ",
                 local_size, ".");
  std::vector<std::string> hosts;
  for (int rank = 0; rank < world_size; ++rank)
    hosts.push_back(c10::str("host", rank / local_size));
  return hosts;
}

}  // namespace

Topology::Topology(const Config& config, int world_size, int local_size)
    : Topology(config, blocks_of(world_size, local_size)) {}

Topology::Topology(const Config& config, const std::vector<std::string>& hosts) : hosts_(hosts) {
  const int world_size = static_cast<int>(hosts.size());
  check_size(config, world_size);
  pp_ = static_cast<int>(config.partitions());
  tp_ = static_cast<int>(config.tensor_parallel_degree());
  rdp_ = world_size / (pp_ * tp_);
  strategy_ = letters(config.placement_strategy());
  for (int rank = 0; rank < world_size; ++rank) {
    Place place;
    int rest = rank;
    for (auto letter = strategy_.rbegin(); letter != strategy_.rend(); ++letter) {
      int& digit = *letter == 'P' ? place.pp : *letter == 'T' ? place.tp : place.rdp;
      const int radix = *letter == 'P' ? pp_ : *letter == 'T' ? tp_ : rdp_;
      digit = rest % radix;
      rest /= radix;
    }
    places_.push_back(place);
  }
}

int64_t Topology::least_size(const Config& config) {
  return config.partitions() * config.tensor_parallel_degree() *
         config.sharded_data_parallel_degree();
}

void Topology::check_size(const Config& config, int world_size) {
  SMP_CHECK_WITH(UsageError, world_size >= 1, "Topology: expected at least one rank, got ",
                 world_size, ".");
  const int64_t pp = config.partitions();
  const std::string remedy = launcher_hint(config, world_size);
  check_divisor("partitions", pp, "the world size", world_size, remedy);
  const int data_parallel = world_size / static_cast<int>(pp);
  check_divisor("tensor_parallel_degree", config.tensor_parallel_degree(),
                "world size / partitions", data_parallel, remedy);
  check_divisor("sharded_data_parallel_degree", config.sharded_data_parallel_degree(),
                "the number of replicas",
                data_parallel / static_cast<int>(config.tensor_parallel_degree()), remedy);
  check_replicas(config, world_size);
}

void Topology::check_rank(int rank) const {
  SMP_CHECK_WITH(UsageError, rank >= 0 && rank < size(), "Topology: expected a rank from 0 to ",
                 size() - 1, ", got ", rank, ".");
}

const std::string& Topology::host(int rank) const {
  check_rank(rank);
  return hosts_[rank];
}

int Topology::local_rank(int rank) const {
  check_rank(rank);
  return static_cast<int>(std::count(hosts_.begin(), hosts_.begin() + rank, hosts_[rank]));
}

int Topology::local_size(int rank) const {
  check_rank(rank);
  return static_cast<int>(std::count(hosts_.begin(), hosts_.end(), hosts_[rank]));
}

int Topology::size(CommGroup group) const {
  switch (group) {
    case CommGroup::kWorld:
      return static_cast<int>(places_.size());
    case CommGroup::kPp:
      return pp_size();
    case CommGroup::kTp:
      return tp_size();
    case CommGroup::kRdp:
      return rdp_size();
    case CommGroup::kMp:
      return mp_size();
    case CommGroup::kDp:
      return dp_size();
  }
  SMP_INTERNAL_ASSERT(false, "unknown group");
}

bool Topology::together(CommGroup group, const Place& a, const Place& b) {
  const bool same_pp = a.pp == b.pp;
  const bool same_tp = a.tp == b.tp;
  const bool same_rdp = a.rdp == b.rdp;
  switch (group) {
    case CommGroup::kWorld:
      return true;
    case CommGroup::kPp:
      return same_tp && same_rdp;
    case CommGroup::kTp:
      return same_pp && same_rdp;
    case CommGroup::kRdp:
      return same_pp && same_tp;
    case CommGroup::kMp:
      return same_rdp;
    case CommGroup::kDp:
      return same_pp;
  }
  SMP_INTERNAL_ASSERT(false, "unknown group");
}

std::vector<int> Topology::members(CommGroup group, int rank) const {
  check_rank(rank);
  std::vector<int> ranks;
  for (int other = 0; other < size(); ++other) {
    if (together(group, places_[rank], places_[other])) ranks.push_back(other);
  }
  return ranks;
}

int Topology::rank_in(CommGroup group, int rank) const {
  const auto ranks = members(group, rank);
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

std::vector<std::vector<int>> Topology::groups(CommGroup group) const {
  std::vector<std::vector<int>> all;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank_in(group, rank) == 0) all.push_back(members(group, rank));
  }
  return all;
}

std::string Topology::to_string() const {
  std::string text = c10::str(size(), " ranks, placement ", strategy_, ": ", pp_, " partitions x ",
                              tp_, " tensor-parallel x ", rdp_, " replicas\n",
                              "rank  host            local  pp  tp  rdp  mp  dp\n");
  for (int rank = 0; rank < size(); ++rank) {
    char line[128];
    std::snprintf(line, sizeof(line), "%4d  %-14.14s  %5d  %2d  %2d  %3d  %2d  %2d\n", rank,
                  hosts_[rank].c_str(), local_rank(rank), pp_rank(rank), tp_rank(rank),
                  rdp_rank(rank), mp_rank(rank), dp_rank(rank));
    text += line;
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const Topology& topology) {
  return out << topology.to_string();
}

}  // namespace smp::core
