// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

namespace smp::comm {

/// Ranks that communicate, numbered 0 to size() - 1 inside the group, and how the group ends.
class Group {
 public:
  virtual ~Group() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// "world", "pp[0,2]" ...: the name of this group in errors.
  virtual const std::string& name() const = 0;

  /// How long a wait may take, from its start, before it throws `TimeoutError`: 300 s at first; a
  /// split inherits it. Throws a `UsageError` unless it is positive.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  virtual std::chrono::milliseconds timeout() const = 0;

  /// Tells all ranks of the job that this one has failed and why: every wait, present or to
  /// come, throws a `CommError` that quotes `reason` and this rank. Never blocks, never throws;
  /// only the first call counts.
  virtual void abort(const std::string& reason) noexcept = 0;

  /// "rank 1 failed: <its reason>" when a rank has aborted, otherwise empty: for a thread
  /// that watches while others wait for something else than this group. Called from any thread.
  virtual std::string abort_text() const = 0;
};

}  // namespace smp::comm
