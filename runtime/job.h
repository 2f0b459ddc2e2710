// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/restart.h"
#include "core/status.h"
#include "core/topology.h"
#include "smp/config.h"

namespace smp::runtime {

/// The values that are fixed for a rank once `init` has returned. Immutable. Internal.
class Job {
 public:
  /// Collective over `world`. `hosts[r]` is the host of rank r. Throws `ConfigError` for a
  /// configuration that is wrong, does not fit the number of ranks or differs between ranks.
  Job(const Config& config, comm::CommunicatorPtr world, const std::vector<std::string>& hosts);
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  const Config& config() const { return config_; }
  const core::Topology& topology() const { return topology_; }
  int rank() const { return world_->rank(); }
  int rank_in(CommGroup group) const { return topology_.rank_in(group, rank()); }
  comm::CommunicatorPtr world() const { return world_; }
  /// Whether layers may be divided.
  bool is_tensor_parallel() const { return topology_.tp_size() > 1; }
  /// From how many ranks a rank runs the batches in a step: those of its tensor-parallel group,
  /// unless they are given one batch.
  int batches() const { return config_.prescaled_batch() ? 1 : topology_.tp_size(); }

  /// Whether `shard_optimizer_state` is in effect: there are several replicas.
  bool shards_optimizer_state() const {
    return config_.shard_optimizer_state() && topology_.rdp_size() > 1;
  }

  /// This rank's status; never null.
  const std::shared_ptr<core::Status>& status() const { return status_; }
  /// The news of earlier starts of the job; nothing at the first. The same on all ranks.
  const std::optional<core::Restart>& restart() const { return restart_; }

  /// Tells the other ranks and the launcher that this rank has failed. Only the first call counts.
  void fail(const std::exception& error) const noexcept;
  void fail(const std::string& reason) const noexcept;

 private:
  void check_same_configuration() const;

  const Config config_;
  const comm::CommunicatorPtr world_;
  const core::Topology topology_;
  std::shared_ptr<core::Status> status_;
  std::optional<core::Restart> restart_;
};

}  // namespace smp::runtime
