// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "core/mesh.h"
#include "smp/comm_group.h"
#include "smp/config.h"

namespace smp::core {

/// Which rank has which part of the model, and with whom it forms groups. A pure value: the same
/// on every rank, computed without communication.
///
/// Placement: a rank is a number in mixed radix whose digits are rdp_rank (D), pp_rank (P) and
/// tp_rank (T), written in the order of `placement_strategy`; the right-most varies fastest.
/// Inside any group, ranks are numbered in ascending order of their world rank.
class Topology {
 public:
  /// For ranks on the named hosts: hosts[r] is that of rank r. Throws `ConfigError` when the
  /// configuration does not fit that many ranks.
  Topology(const Config& config, const std::vector<std::string>& hosts);

  /// Throws `ConfigError` unless the degrees of the configuration divide `world_size`, naming the
  /// values that do, and where it has replicas without "ddp".
  static void check_size(const Config& config, int world_size);
  /// More ranks than any job has.
  static constexpr int kMostRanks = 1 << 20;
  /// How many ranks the degrees of the configuration take: one replica, or one group of sharded
  /// replicas.
  static int64_t least_size(const Config& config);

  int size() const { return static_cast<int>(hosts_.size()); }
  /// The name of the host of world rank `rank`.
  const std::string& host(int rank) const;
  int local_rank(int rank) const;
  int local_size(int rank) const;
  int dp_rank(int rank) const { return rank_in(CommGroup::kDp, rank); }
  int pp_size() const { return pp_; }
  int tp_size() const { return tp_; }
  int rdp_size() const { return rdp_; }

  /// A kind of group as the axes that it folds, or those of letters of `placement_strategy`.
  Axes axes(CommGroup group) const;
  Axes axes(const std::string& letters) const;
  /// The ranks that differ in pp_rank, tp_rank or rdp_rank only.
  Axis axis(CommGroup group) const { return axes(group).digits.front(); }
  /// The replicas that divide parameters, or their state for updates: with sharded data parallelism
  /// neighbours, else all.
  Axis pieces() const;
  /// The number of ranks of each group of this kind.
  int size(CommGroup group) const { return axes(group).size(); }

  /// The position of world rank `rank` inside its group of this kind.
  int rank_in(CommGroup group, int rank) const;

  /// The world ranks, ascending, of the group of this kind that `rank` belongs to.
  std::vector<int> members(CommGroup group, int rank) const;

 private:
  void check_rank(int rank) const;

  int pp_ = 1;
  int tp_ = 1;
  int rdp_ = 1;
  int sdp_ = 1;
  std::string strategy_;
  std::vector<std::string> hosts_;  // hosts by world rank
};

}  // namespace smp::core
