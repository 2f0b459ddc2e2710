// SPDX-License-Identifier: Apache-2.0
#include "runtime/save/kept_copy.h"

#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <utility>

#include "checkpoint/file.h"
#include "checkpoint/save_lock.h"
#include "core/check.h"
#include "core/env.h"
#include "core/failure.h"
#include "core/log.h"
#include "core/restart.h"
#include "runtime/save/copy_transfer.h"
#include "runtime/save/saving.h"

namespace smp::runtime {
namespace {

/// The interval of kept copies from now on, in calls, measured by rank 0 on the one before this,
/// which has ended. Neither the first nor one that failed says anything. The same on all ranks, for
/// all keep the same.
int64_t measured_interval(comm::Communicator& world, const CopyPace& pace,
                          CopyPace::Clock::time_point begin) {
  int64_t interval = pace.interval;
  const double took = pace.last_took ? pace.last_took->load() : 0;
  if (took > 0) {
    const std::chrono::duration<double> since = begin - pace.last_call;
    interval = next_interval(interval, took, since.count() / static_cast<double>(interval));
  }
  const at::Tensor agreed = at::scalar_tensor(interval, at::kLong);
  world.broadcast(agreed, 0);
  return agreed.item<int64_t>();
}

}  // namespace

std::shared_ptr<const CopyHolders> find_copy_holders(const Config& config,
                                                     comm::Communicator& world) {
  if (config.recovery() == "off") return nullptr;
  const auto folder = core::env(core::kRecoveryDirVariable);
  const auto all = comm::all_gather_bytes(world, folder.value_or(""));
  const auto without = std::find(all.begin(), all.end(), "");
  SMP_CHECK_WITH(
      ConfigError, without == all.end(), "config key \"recovery\": \"", config.recovery(),
      "\" needs a launcher that starts the job again, and ", core::kRecoveryDirVariable,
      ", the folder for what it goes on from, is not set (on rank ", without - all.begin(),
      "). Start the program by smprun, or by torchrun with that "
      "variable (docs/recovery.md)");
  return std::make_shared<CopyHolders>(CopyHolders::find(*folder, world));
}

void note_what_was_before(const Job& job, const CheckpointContext& context) {
  const bool is_kept_by_launcher = core::env(core::kFailureDirVariable).has_value();
  if (!job.restart() || !context.holders || is_kept_by_launcher) return;
  if (!context.notes_progress()) return;
  const auto noted = core::read_progress(context.holders->folder());
  const auto own = noted ? noted->checkpoints : std::vector<core::SavedCheckpoint>();
  for (const core::SavedCheckpoint& saved : job.restart()->before.checkpoints) {
    if (std::find(own.begin(), own.end(), saved) == own.end()) core::note_checkpoint(saved);
  }
}

void keep_copy(Runtime& runtime, const CheckpointParts& parts, const std::string& user_content) {
  CheckpointContext& context = *runtime.checkpoint_context;
  if (context.holders == nullptr) return;
  CopyPace& pace = context.copy_pace;
  if (pace.calls_to_next-- > 0) return;
  const auto begin = CopyPace::Clock::now();
  const int64_t interval = runtime.config().recovery_interval();
  if (interval > 0) pace.interval = interval;
  pace.calls_to_next = pace.interval - 1;  // also if this one fails
  const CopyPace::Seconds took = std::make_shared<std::atomic<double>>(0);
  SaveRequest request;
  request.call = "smp::keep_copy";
  request.holders = context.holders;
  request.path = context.holders->copy();
  request.lock = checkpoint::lock_of_writer(request.path);
  request.asynchronous = true;
  request.medium = context.holders->medium();
  request.user_content = user_content;
  if (context.notes_progress()) {
    request.note = [steps = runtime.progress.training_steps] { core::note_kept_copy(steps); };
  }
  request.when_saved = [took, &pace](double seconds) {
    *took = seconds;
    pace.has_told_of_failure = false;
  };
  const bool tells = runtime.rank() == 0;
  request.when_failed = [&pace, tells](const CheckpointError& error) {
    if (tells && !std::exchange(pace.has_told_of_failure, true)) {
      core::log_warning(
          c10::str("smp::keep_copy: ", core::text_without_prefix(error),
                   ". Training goes on, and the copy before stays: what follows is lost if a rank "
                   "fails now. This is not said again until a copy was kept"));
    }
  };
  save(request, parts);
  if (interval == 0) {
    pace.interval = measured_interval(*runtime.world(), pace, begin);
    pace.calls_to_next = pace.interval - 1;
  }
  pace.last_call = CopyPace::Clock::now();
  pace.last_took = took;
}

std::vector<std::string> checkpoints_before(const Job& job, CheckpointContext& context) {
  if (!job.restart()) return {};
  const auto& saved = job.restart()->before.checkpoints;
  std::vector<std::string> paths;
  for (const core::SavedCheckpoint& checkpoint : saved) paths.push_back(checkpoint.path);
  if (context.holders == nullptr) return paths;
  try {
    if (const auto steps = collect_copy(*context.group(), *context.holders)) {
      const bool is_newest = saved.empty() || saved.back().steps <= *steps;
      paths.insert(is_newest ? paths.end() : paths.end() - 1, context.holders->copy());
    }
  } catch (const CheckpointError& error) {  // on all ranks
    if (job.rank() == 0) core::log_warning(core::text_without_prefix(error));
  }
  return paths;
}

}  // namespace smp::runtime
