// SPDX-License-Identifier: Apache-2.0
#include "runtime/job.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <tuple>
#include <utility>

#include "comm/nccl/nccl_groups.h"
#include "core/check.h"
#include "core/env.h"
#include "core/failure.h"
#include "core/log.h"
#include "runtime/first_difference.h"

namespace smp::runtime {
namespace {

Config effective(const Config& config) {
  Config merged = config.merged_with_environment();
  merged.validate();
  SMP_CHECK_WITH(ConfigError, merged.ddp_dist_backend() != "nccl" || comm::has_nccl(),
                 "config key \"ddp_dist_backend\": \"nccl\" needs a build with NCCL, which this is "
                 "not. Build for CUDA (docs/cuda.md), or use \"auto\"");
  return merged;
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

/// The name of a job for users: the number that it was given, else the process of rank 0.
std::string job_name() {
  if (const auto id = core::env("SMP_JOB_ID")) return *id;
  const auto id = core::env("TORCHELASTIC_RUN_ID");
  return id && *id != "none" ? *id : std::to_string(getpid());  // "none" is torchrun's default
}

/// Collective: rank 0 says which job this is.
std::shared_ptr<core::Status> make_status(comm::Communicator& world,
                                          const std::vector<std::string>& hosts, double stall) {
  std::random_device random;
  const std::string job =
      comm::broadcast_bytes(world, c10::str(random(), "-", random(), " ", job_name()), 0);
  const size_t id_end = job.find(' ');
  core::StatusOwner owner;
  owner.job_id = job.substr(0, id_end);
  owner.job = job.substr(id_end + 1);
  owner.rank = world.rank();
  owner.hosts = hosts;
  return std::make_shared<core::Status>(owner, milliseconds(stall));
}

/// The amount of known progress.
auto known(const core::JobProgress& progress) {
  const auto& saved = progress.checkpoints;
  return std::tuple(progress.steps, saved.empty() ? 0 : saved.back().steps, saved.size());
}

/// The news of earlier starts of the job, the same on all ranks: from the ranks that know the most,
/// since a host that is new to the job knows nothing. Collective over the world.
std::optional<core::Restart> agree_on_restart(comm::Communicator& world) {
  const auto mine = core::this_restart();
  std::optional<core::Restart> agreed;
  for (const std::string& text : comm::all_gather_bytes(world, mine ? mine->to_text() : "")) {
    if (text.empty()) continue;
    core::Restart other = core::Restart::from_text(text);
    if (!agreed) agreed.emplace();
    agreed->number = std::max(agreed->number, other.number);
    if (known(other.before) > known(agreed->before)) agreed->before = std::move(other.before);
  }
  return agreed;
}

}  // namespace

Job::Job(const Config& config, comm::CommunicatorPtr world, const std::vector<std::string>& hosts)
    : config_(effective(config)), world_(std::move(world)), topology_(config_, hosts) {
  const auto context = [&] {
    std::string text = c10::str("smp rank ", rank());
    if (topology_.pp_size() > 1) {
      text += c10::str(" pp ", rank_in(CommGroup::kPp), "/", topology_.pp_size());
    }
    if (topology_.rdp_size() > 1) {
      text += c10::str(is_tensor_parallel() ? " rdp " : " dp ", rank_in(CommGroup::kRdp), "/",
                       topology_.rdp_size());
    }
    if (topology_.tp_size() > 1) {
      text += c10::str(" tp ", rank_in(CommGroup::kTp), "/", topology_.tp_size());
    }
    return text;
  };
  if (world_->size() > 1) core::set_error_context(context());
  world_->set_timeout(milliseconds(config_.timeout_seconds()));
  status_ = make_status(*world_, hosts, config_.stall_seconds());
  check_same_configuration();
  restart_ = agree_on_restart(*world_);
  if (rank() == 0) {
    core::note_configuration(config_.to_json());
    for (const std::string& line : config_.overridden()) core::log_info(line);
  }
  // Settings of the world, inherited by its splits.
  world_->check_collectives(config_.check_collectives());
  world_->set_device_transport(
      {config_.ddp_dist_backend() == "nccl", config_.numerics() == "fast"});
}

void Job::check_same_configuration() const {
  const auto all = comm::all_gather_bytes(*world_, config_.to_json());
  const size_t other = first_other(all);
  SMP_CHECK_WITH(ConfigError, other == 0, "the configuration differs between ranks. Rank 0 has ",
                 all[0], ", rank ", other, " has ", all[other],
                 ". Start all ranks with the same configuration");
}

void Job::fail(const std::exception& error) const noexcept {
  core::record_failure(rank(), error);
  if (world_->size() > 1) world_->abort(core::message_of(error));
}

void Job::fail(const std::string& reason) const noexcept {
  core::record_failure(rank(), reason);
  if (world_->size() > 1) world_->abort(reason);
}

}  // namespace smp::runtime
