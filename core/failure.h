// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace smp::core {

/// The environment variable with the folder in which ranks leave their last words. `smprun` sets
/// it and reads the folder when the job has failed.
constexpr const char* kFailureDirVariable = "SMP_FAILURE_DIR";

/// A rank that others wait for and that does not wait itself, and its state: "is stopped; it has
/// been in 1B0 of step 12 for 41 s".
struct StallCause {
  int rank = 0;
  std::string how;
};

/// The record that one rank wrote before it ended.
struct Failure {
  enum class Kind {
    kOwn,        ///< It failed by itself.
    kHeard,      ///< Another rank had failed, and told.
    kTimedOut,   ///< Others did not come within the time-out.
    kPeerEnded,  ///< The process of another rank had ended.
  };

  int rank = 0;
  /// How many failures of the job had been recorded before, on whatever host.
  int64_t order = 0;
  Kind kind = Kind::kOwn;
  /// The ranks that it waited for, and whose part was missing.
  std::vector<int> missing;
  /// Where the chain of waits ended, if that was seen.
  std::optional<StallCause> cause;
  std::string message;
};

/// Mixin for errors of waits: tells the launcher which ranks were missing and why.
class FailedWait {
 public:
  FailedWait(Failure::Kind kind, std::vector<int> missing, std::optional<StallCause> cause)
      : kind_(kind), missing_(std::move(missing)), cause_(std::move(cause)) {}
  virtual ~FailedWait() = default;

  Failure::Kind kind() const { return kind_; }
  /// The ranks of the world whose part was missing.
  const std::vector<int>& missing() const { return missing_; }
  /// Where the chain of waits ended, if that was seen.
  const std::optional<StallCause>& cause() const { return cause_; }

  /// Throws the same error with `text` at the end of its message.
  [[noreturn]] virtual void throw_with(const std::string& text) const = 0;

 private:
  Failure::Kind kind_;
  std::vector<int> missing_;
  std::optional<StallCause> cause_;
};

/// The text of an error, without libtorch's backtrace unless the environment has SMP_BACKTRACE=1.
std::string message_of(const std::exception& error);

/// Writes the failure to `<SMP_FAILURE_DIR>/<rank>`, so that the launcher can name the first cause
/// after all ranks have ended. Only the first call of a process writes; without the variable
/// nothing happens. The file appears complete or not at all. May be called from any thread and from
/// a handler that is about to abort: it never throws.
void record_failure(int rank, const std::exception& error) noexcept;
void record_failure(int rank, const std::string& message,
                    Failure::Kind kind = Failure::Kind::kOwn) noexcept;

/// Notes that a wait of this process has failed since another's has ended. The program may catch
/// that and end: then `record_failed_wait` records it. The first call counts.
void note_failed_wait(int rank, const std::exception& error) noexcept;

/// Does the same as `record_failure`, of the wait that was noted. Returns its message; nothing if
/// none was.
std::optional<std::string> record_failed_wait() noexcept;

/// Whether this process has left `message` for the launcher; other threads then need not report it.
bool is_recorded(const std::string& message);

/// The failures that the files of `directory` tell of, in the order in which they were recorded:
/// clocks of hosts that share the folder may differ, and have no say. Files that are no
/// failure records are skipped.
std::vector<Failure> read_failures(const std::string& directory);

}  // namespace smp::core
