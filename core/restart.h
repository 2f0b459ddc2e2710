// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace smp::core {

/// The environment variable that says in a job that `smprun` has started again: text of a
/// `Restart`.
constexpr const char* kRestartVariable = "SMP_RESTART";

/// The environment variable with the folder that outlives the processes of a job, for
/// `"recovery"`: in memory, unless the user says otherwise. `smprun` makes it for its job; where
/// another launcher starts ranks again, its user sets it.
constexpr const char* kRecoveryDirVariable = "SMP_RECOVERY_DIR";

/// The checkpoint in such a folder, see `smp::keep_copy`.
std::string kept_copy_path(const std::string& folder);

/// A checkpoint that is complete and has the optimizer.
struct SavedCheckpoint {
  std::string path;   ///< path that the program gave
  int64_t steps = 0;  ///< training steps that are in it

  bool operator==(const SavedCheckpoint& other) const {
    return path == other.path && steps == other.steps;
  }
};

/// How far a job has come, as world rank 0 notes it for the launcher: in `SMP_FAILURE_DIR`, else in
/// `SMP_RECOVERY_DIR`. Where several folders of that name keep copies, a rank for each does. A
/// process that is killed has noted everything before.
struct JobProgress {
  /// Steps of training done, those before a checkpoint that the job went on from among them.
  int64_t steps = 0;
  std::vector<SavedCheckpoint> checkpoints;  ///< the newest last
  /// The steps that are in the copy kept in memory; nothing if there is none.
  std::optional<int64_t> kept_steps = std::nullopt;

  /// Whether there is a copy, and no checkpoint has more steps.
  bool copy_is_newest() const {
    return kept_steps && (checkpoints.empty() || checkpoints.back().steps <= *kept_steps);
  }
};

/// Notes for `smprun` that this rank has come to `smp::init`.
void note_arrival() noexcept;
/// The ranks of which that was noted in `directory`.
std::set<int> read_arrivals(const std::string& directory);

/// Note how far this job has come. Without the variables nothing happens. A note that cannot be
/// written is left out: training goes on.
void note_steps(int64_t steps) noexcept;
void note_checkpoint(const SavedCheckpoint& checkpoint) noexcept;
void note_kept_copy(int64_t steps) noexcept;

/// Notes the configuration in effect, text of JSON, for the launcher that has to start the job
/// again.
void note_configuration(const std::string& json) noexcept;
/// The configuration noted in `directory`; nothing if no rank 0 that sees it has begun.
std::optional<std::string> read_configuration(const std::string& directory);

/// The progress noted in `directory`; nothing if no rank 0 that sees it has begun.
std::optional<JobProgress> read_progress(const std::string& directory);

/// The news of a restart for the ranks of a job.
struct Restart {
  int number = 0;      ///< 1 for the first restart
  JobProgress before;  ///< progress of the starts before this one

  std::string to_text() const;
  /// Throws `ConfigError` for another text.
  static Restart from_text(const std::string& text);
};

/// That of this process, by `smprun`, or by torchrun's agent, which counts its restarts, with the
/// notes in `SMP_RECOVERY_DIR`; nothing for a job that is started for the first time.
std::optional<Restart> this_restart();

}  // namespace smp::core
