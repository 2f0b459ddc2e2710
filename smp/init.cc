// SPDX-License-Identifier: Apache-2.0
#include "smp/init.h"

#include <ATen/DeviceAccelerator.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "comm/process_end.h"
#include "comm/threads/run_ranks.h"
#include "comm/world.h"
#include "core/check.h"
#include "core/deterministic.h"
#include "core/env.h"
#include "core/failure.h"
#include "core/restart.h"
#include "core/status.h"
#include "core/tensor_memory.h"
#include "runtime/runtime.h"
#include "runtime/save/background_save.h"
#include "runtime/save/job_notes.h"
#include "runtime/session/session.h"
#include "smp/detail/session.h"
#include "smp/exit_status.h"

namespace smp {
namespace {

using runtime::Runtime;

/// The handler to call after our own; null while that is not installed.
std::terminate_handler previous_terminate = nullptr;

/// The process that called `init`. One that it has forked is no rank.
pid_t rank_process = 0;

/// The session that `begin_session` began, for all threads of the process.
struct ProcessSession {
  explicit ProcessSession(std::unique_ptr<runtime::Session> begun) : session(std::move(begun)) {
    if (session->runtime()->config().deterministic()) kernels.emplace();
  }

  const std::unique_ptr<runtime::Session> session;
  std::optional<core::DeterministicKernels> kernels;
};

/// Null in programs that call `init`.
std::unique_ptr<ProcessSession>& process_session() {
  static auto* session = new std::unique_ptr<ProcessSession>;  // outlives its threads
  return *session;
}

bool is_rank() { return rank_process == getpid() && Runtime::exists(); }

/// Leaves word of an uncaught exception; returns its text.
std::string tell(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    if (is_rank()) Runtime::get().fail(exception);
    return core::message_of(exception);
  } catch (...) {
    const std::string message = "an exception that is no std::exception";
    if (is_rank()) Runtime::get().fail(message);
    return message;
  }
}

/// The program's own handler, if it has one: that of libstdc++ repeats the message, and MPI would
/// print a stack of each rank.
void call_previous_handler() {
  // Taken out, since a handler installed after ours may call it again.
  const auto previous = std::exchange(previous_terminate, nullptr);
  const bool is_default = previous == &__gnu_cxx::__verbose_terminate_handler;
  if (core::env("SMP_BACKTRACE") == "1" || !is_default) {
    if (previous != nullptr) previous();
  } else {
    std::signal(SIGABRT, SIG_DFL);
  }
}

/// Leaves word of an uncaught exception for the launcher before the process aborts.
[[noreturn]] void on_terminate() {
  if (const auto error = std::current_exception()) {
    const std::string message = tell(error);
    // `smprun` prints the failures that it finds.
    if (!core::is_recorded(message)) std::cerr << message << std::endl;
  }
  call_previous_handler();
  std::abort();
}

void install_terminate_handler() {
  if (std::get_terminate() != &on_terminate) previous_terminate = std::set_terminate(&on_terminate);
}

/// Unless the program has installed another one since.
void restore_terminate_handler() {
  if (std::get_terminate() == &on_terminate) std::set_terminate(previous_terminate);
}

/// Flushes the program's output, which `_Exit` would lose.
void flush_streams() {
  std::cout.flush();
  std::clog.flush();
  std::fflush(nullptr);
}

/// The others see this rank's actions until they have parted.
struct LastStatus {
  ~LastStatus() { core::set_process_status(nullptr); }
};

/// Ends the session, after which there may be another one.
void end_process_session() {
  const LastStatus status;
  const auto ended = std::exchange(process_session(), nullptr);
  Runtime::set_for_process(nullptr);
  core::set_error_context("");
  ended->session->end();
}

/// Ends the rank with the others; an error on the way is left for the launcher. `call` as errors
/// have it.
void end_world(const char* call) {
  const auto world = Runtime::exists() ? Runtime::get().world() : nullptr;
  if (world != nullptr) Runtime::get().checkpoint_context->end();
  const LastStatus status;
  const core::CallScope here(call, "smp::shutdown", "smp::shutdown");
  Runtime::set_for_process(nullptr);
  try {
    if (world != nullptr) world->world_end()->let_go();
    comm::finalize_world();
  } catch (const std::exception& error) {
    core::record_failure(world == nullptr ? 0 : world->rank(), error);
    throw;
  }
}

/// A program that ends because another rank has failed is not the cause.
[[noreturn]] void end_with(int status) {
  const std::string reason = c10::str("the program ended with exit status ", status);
  if (comm::world_aborted()) {
    core::record_failure(Runtime::get().rank(), reason, core::Failure::Kind::kHeard);
  } else if (const auto wait = core::record_failed_wait()) {
    Runtime::get().world()->abort(*wait);
  } else {
    Runtime::get().fail(reason);
  }
  std::_Exit(status);
}

/// A program that stops because it was asked to has not failed.
bool is_failure(int status) {
  const bool has_stopped = status == kPreemptedStatus && Runtime::get().progress.stop_is_agreed;
  return status != 0 && !has_stopped;
}

/// Ends MPI with the program. A program that caught an exception and returns non-zero has left the
/// others waiting: they are told, or they would run into their time-outs. A forked process has
/// copies of the job's objects, which it must not end. `_Exit`, because destructors of static
/// objects might wait for other ranks.
void finish_at_exit(int status) {
  if (!Runtime::exists() || process_session()) return;
  flush_streams();
  if (!is_rank()) std::_Exit(status);
  if (is_failure(status)) end_with(status);
  try {
    end_world("smp::shutdown, as its program has ended");
  } catch (const std::exception& error) {
    if (!core::is_recorded(core::message_of(error))) std::cerr << error.what() << std::endl;
    std::_Exit(1);
  }
  // MPI would call a job that lost a rank a success if this one returned zero.
  if (comm::world_aborted()) std::_Exit(1);
}

/// Adds the settings of the environment. Under MPI an error in the configuration shall be known to
/// all ranks, so it is thrown when they have met.
Config config_of_meeting(const Config& config) {
  try {
    return config.merged_with_environment();
  } catch (const ConfigError&) {
    if (comm::launcher() == comm::Launcher::kTorchrun) throw;
    return config;
  }
}

/// False for a wrong configuration, of which the ranks' runtimes speak.
bool is_deterministic(const Config& config) {
  try {
    return config.merged_with_environment().deterministic();
  } catch (const ConfigError&) {
    return false;
  }
}

comm::CommunicatorPtr meet(const Config& config) {
  const Config effective = config_of_meeting(config);
  runtime::prepare_process(effective);
  return comm::make_world(runtime::timeout_of(effective),
                          static_cast<int>(effective.ddp_port().value_or(0)));
}

/// Sets up the runtime of the process on a world.
void start_runtime(const Config& config, const comm::CommunicatorPtr& world,
                   const std::vector<std::string>& hosts) {
  Runtime::set_for_process(runtime::start_runtime(config, world, hosts));
  const Runtime& runtime = Runtime::get();
  if (runtime.config().deterministic()) core::use_deterministic_kernels();
  runtime::choose_memory(runtime.config());
  runtime::note_steps(*runtime.checkpoint_context, runtime.progress);
}

}  // namespace

void init(const Config& config) {
  SMP_CHECK_WITH(UsageError, !Runtime::exists(),
                 "smp::init was called twice; call it once at the start of main()");
  rank_process = getpid();
  core::note_arrival();
  install_terminate_handler();
  const auto world = meet(config);
  try {
    start_runtime(config, world, comm::world_hosts().names);
  } catch (const std::exception& error) {
    core::record_failure(world->rank(), error);
    throw;
  }
  comm::at_process_end(&finish_at_exit);
}

void detail::begin_session(const Config& config, int64_t communicator) {
  const auto checked = [&] {
    SMP_CHECK_WITH(UsageError, !Runtime::exists(),
                   "a session was begun while another one is open in this process. End that "
                   "first: smp::shutdown()");
    return config;
  };
  auto begun = std::make_unique<runtime::Session>(checked, communicator);
  process_session() = std::make_unique<ProcessSession>(std::move(begun));
  const runtime::Session& session = *process_session()->session;
  Runtime::set_for_process(session.runtime());
  core::set_error_context(session.error_context());
}

void shutdown() {
  if (process_session()) return end_process_session();
  end_world("smp::shutdown");
  restore_terminate_handler();
}

bool is_initialized() { return Runtime::exists(); }

bool is_tracing() { return Runtime::exists() && Runtime::get().current_step.is_captured; }

void run_as_threads(int ranks, const Config& config, const std::function<void()>& program) {
  // Blocks of libtorch's own leave more of a heap unused the more sizes of batches there are.
  if (config.keep_freed_memory()) core::take_tensor_memory_from_malloc();
  if (is_deterministic(config)) {
    core::set_deterministic_workspace();
    core::use_deterministic_kernels();
  }
  comm::run_ranks(ranks, [&](const comm::CommunicatorPtr& world) {
    const std::vector<std::string> hosts(ranks, "threads");
    const runtime::ThreadRuntime here(runtime::start_runtime(config, world, hosts));
    program();
  });
}

void set_device(int index) {
  const auto type = at::getAccelerator();
  if (!type || at::accelerator::deviceCount() == 0) return;
  at::accelerator::setDeviceIndex(static_cast<c10::DeviceIndex>(index));
  if (Runtime::exists()) {
    Runtime::get().choose_device({*type, static_cast<c10::DeviceIndex>(index)});
  }
}

c10::Device device() { return Runtime::get().device(); }

}  // namespace smp
