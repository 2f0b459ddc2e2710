// SPDX-License-Identifier: Apache-2.0
#include "core/topology.h"

#include <algorithm>

#include "core/check.h"

namespace smp {

namespace {

/// Kinds of groups in the order of `CommGroup`, with the digits in which their ranks differ.
struct GroupKind {
  const char* name;
  const char* digits;
};
constexpr GroupKind kGroups[] = {{"world", "PTD"}, {"pp", "P"},  {"tp", "T"},
                                 {"rdp", "D"},     {"mp", "PT"}, {"dp", "TD"}};

}  // namespace

const char* to_string(CommGroup group) { return kGroups[static_cast<int>(group)].name; }

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

}  // namespace

Topology::Topology(const Config& config, const std::vector<std::string>& hosts) : hosts_(hosts) {
  const int world_size = static_cast<int>(hosts.size());
  check_size(config, world_size);
  pp_ = static_cast<int>(config.partitions());
  tp_ = static_cast<int>(config.tensor_parallel_degree());
  rdp_ = world_size / (pp_ * tp_);
  sdp_ = static_cast<int>(config.sharded_data_parallel_degree());
  strategy_ = letters(config.placement_strategy());
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

Axis Topology::pieces() const {
  const Axis replicas = axis(CommGroup::kRdp);
  return sdp_ > 1 ? replicas.split(sdp_).first : replicas;
}

Axes Topology::axes(CommGroup group) const { return axes(kGroups[static_cast<int>(group)].digits); }

Axes Topology::axes(const std::string& letters) const {
  Axes result;
  int stride = 1;
  for (auto letter = strategy_.rbegin(); letter != strategy_.rend(); ++letter) {
    const int size = *letter == 'P' ? pp_ : *letter == 'T' ? tp_ : rdp_;
    if (letters.find(*letter) != std::string::npos) {
      result.digits.insert(result.digits.begin(), {stride, size});
    }
    stride *= size;
  }
  return result;
}

std::vector<int> Topology::members(CommGroup group, int rank) const {
  check_rank(rank);
  return axes(group).members(rank);
}

int Topology::rank_in(CommGroup group, int rank) const {
  check_rank(rank);
  return axes(group).index_of(rank);
}

}  // namespace smp::core
