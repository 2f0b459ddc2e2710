// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/DeviceGuard.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/session_world.h"
#include "core/deterministic.h"
#include "runtime/runtime.h"
#include "smp/config.h"

namespace smp::runtime {

/// How long ranks wait for each other.
std::chrono::milliseconds timeout_of(const Config& config);

/// Does the work that has to precede the threads of a world. Internal.
void prepare_process(const Config& config);

/// The runtime of a rank, with the parts that each rank has. Collective over `world`; throws as
/// `Job`. Internal.
std::shared_ptr<Runtime> start_runtime(const Config& config, comm::CommunicatorPtr world,
                                       const std::vector<std::string>& hosts);

/// Sets how this process keeps memory that is freed. Internal.
void choose_memory(const Config& config);

/// A world that ends before its process does, and its runtime. Sessions know nothing of each other:
/// a process may have several, one after the other and at the same time, and each belongs to one
/// thread at a time. Internal.
class Session {
 public:
  /// Begins a session on the ranks of a communicator of the program's MPI, given by its Fortran
  /// handle, or, without one, on this process alone, whatever has launched it. Collective over the
  /// communicator. `config` is called first; its exception is thrown when the other ranks know that
  /// this one cannot begin. Throws as `SessionWorld::meet` and `Job` do.
  Session(const std::function<Config()>& config, const std::optional<int64_t>& communicator);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  /// The runtime; null when the session has ended.
  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  /// The words with which errors of this rank begin.
  const std::string& error_context() const { return error_context_; }

  /// Ends the session with the other ranks. Collective; throws as `SessionWorld::finish` does. Does
  /// nothing the second time.
  void end();

 private:
  void begin(const Config& config);

  std::optional<comm::SessionWorld> world_;
  std::shared_ptr<Runtime> runtime_;
  std::string error_context_;
};

/// Has errors of this thread begin with other words until the end of the block.
class ErrorContextScope {
 public:
  explicit ErrorContextScope(const std::string& context);
  ~ErrorContextScope();
  ErrorContextScope(const ErrorContextScope&) = delete;
  ErrorContextScope& operator=(const ErrorContextScope&) = delete;

 private:
  const std::string before_;
};

/// Until the end of the block this thread is the session's: the functions of smp.h act on it, its
/// GPU is the current one, and libtorch takes the kernels that its configuration asks for. A thread
/// is in one at a time.
class SessionScope {
 public:
  explicit SessionScope(const Session& session);

 private:
  const ThreadRuntime runtime_;
  const ErrorContextScope context_;
  c10::OptionalDeviceGuard device_;
  std::optional<core::DeterministicKernels> kernels_;
};

}  // namespace smp::runtime
