// SPDX-License-Identifier: Apache-2.0
#include "runtime/session/session.h"

#include <exception>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "core/check.h"
#include "core/failure.h"
#include "core/heap.h"
#include "core/restart.h"
#include "core/status.h"
#include "core/stop_request.h"
#include "core/tensor_memory.h"
#include "runtime/save/background_save.h"
#include "runtime/save/job_notes.h"
#include "runtime/save/kept_copy.h"
#include "runtime/step/replica_join.h"
#include "runtime/update/update_watch.h"

namespace smp::runtime {
namespace {

/// The start of a session: its configuration, or the error for which this rank cannot begin.
struct Start {
  Config config;
  std::exception_ptr error;
  std::string problem;
};

Start start(const std::function<Config()>& config) {
  try {
    Config effective = config().merged_with_environment();
    effective.validate();
    prepare_process(effective);
    return {std::move(effective), nullptr, ""};
  } catch (const std::exception& error) {
    return {Config(), std::current_exception(), core::message_of(error)};
  }
}

comm::SessionWorld meet(const Start& start, const std::optional<int64_t>& communicator) {
  if (!communicator) {
    if (start.error) std::rethrow_exception(start.error);
    return comm::SessionWorld::alone();
  }
  try {
    return comm::SessionWorld::meet(*communicator, timeout_of(start.config), start.problem);
  } catch (const std::exception&) {
    if (start.error) std::rethrow_exception(start.error);
    throw;
  }
}

/// The others see this rank's actions until they have parted, when its runtime has ended.
class LastStatus {
 public:
  explicit LastStatus(std::shared_ptr<core::Status> status) : no_runtime_(nullptr) {
    core::set_thread_status(std::move(status));
  }

 private:
  const ThreadRuntime no_runtime_;  // gives the thread its own status back, too
};

}  // namespace

std::chrono::milliseconds timeout_of(const Config& config) {
  return std::chrono::milliseconds(static_cast<int64_t>(config.timeout_seconds() * 1000));
}

void prepare_process(const Config& config) {
  if (config.deterministic()) core::set_deterministic_workspace();
  if (config.preempt_seconds() > 0) {
    core::take_stop_requests(
        std::chrono::nanoseconds(static_cast<int64_t>(config.preempt_seconds() * 1e9)));
  }
}

std::shared_ptr<Runtime> start_runtime(const Config& config, comm::CommunicatorPtr world,
                                       const std::vector<std::string>& hosts) {
  const auto runtime = std::make_shared<Runtime>(config, std::move(world), hosts);
  runtime->checkpoint_context = std::make_shared<CheckpointContext>(
      runtime->world(), find_copy_holders(runtime->config(), *runtime->world()));
  note_what_was_before(*runtime, *runtime->checkpoint_context);
  runtime->update_watch = std::make_shared<UpdateWatch>(*runtime);
  runtime->replica_join = std::make_shared<ReplicaJoin>(*runtime);
  return runtime;
}

void choose_memory(const Config& config) {
  if (!config.keep_freed_memory()) return;
  core::keep_freed_memory();
  core::take_tensor_memory_from_malloc();
}

Session::Session(const std::function<Config()>& config,
                 const std::optional<int64_t>& communicator) {
  const Start started = start(config);
  world_.emplace(meet(started, communicator));
  const ErrorContextScope context(core::error_context());
  try {
    begin(started.config);
  } catch (const std::exception& error) {
    world_->world()->abort(core::message_of(error));
    runtime_ = nullptr;
    world_->finish();
    throw;
  }
}

void Session::begin(const Config& config) {
  core::note_arrival();
  runtime_ = start_runtime(config, world_->world(), world_->hosts());
  error_context_ = core::error_context();
  const SessionScope here(*this);
  choose_memory(runtime_->config());
  note_steps(*runtime_->checkpoint_context, runtime_->progress);
  // A rank that fails at once must not end the store while others form groups there.
  runtime_->world()->barrier();
}

void Session::end() {
  if (runtime_ == nullptr) return;
  {
    const SessionScope here(*this);
    runtime_->checkpoint_context->end();
  }
  const ErrorContextScope context(error_context_);
  const int rank = runtime_->rank();
  const LastStatus status(runtime_->status());
  const core::CallScope here("smp::shutdown", "smp::shutdown");
  runtime_ = nullptr;
  auto ended = std::exchange(world_, std::nullopt);
  try {
    ended->finish();
  } catch (const std::exception& error) {
    core::record_failure(rank, error);
    throw;
  }
}

ErrorContextScope::ErrorContextScope(const std::string& context) : before_(core::error_context()) {
  core::set_error_context(context);
}

ErrorContextScope::~ErrorContextScope() { core::set_error_context(before_); }

SessionScope::SessionScope(const Session& session)
    : runtime_(session.runtime()), context_(session.error_context()) {
  const Runtime& runtime = *session.runtime();
  if (!runtime.device().is_cpu()) device_.reset_device(runtime.device());
  if (runtime.config().deterministic()) kernels_.emplace();
}

}  // namespace smp::runtime
