#include "smp/init.h"

#include <ATen/DeviceAccelerator.h>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/threads/run_ranks.h"
#include "comm/world.h"
#include "core/check.h"
#include "core/failure.h"
#include "core/heap.h"
#include "runtime/runtime.h"

namespace smp {
namespace {

using runtime::Runtime;

std::terminate_handler previous_terminate = nullptr;

/// An exception that nobody caught: leave word of it for the launcher before the process aborts.
[[noreturn]] void on_terminate() {
  if (const auto error = std::current_exception()) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& exception) {
      if (Runtime::exists()) Runtime::get().fail(exception.what());
    } catch (...) {
      if (Runtime::exists()) Runtime::get().fail("an exception that is no std::exception");
    }
  }
  if (previous_terminate != nullptr) previous_terminate();
  std::abort();
}

/// Ends MPI with the program. A program that caught an exception and returns non-zero has left the
/// others waiting: they are told, or they would run into their time-outs.
void finish_at_exit(int status, void*) {
  if (!Runtime::exists()) return;
  if (status != 0) {
    Runtime::get().fail(c10::str("the program ended with exit status ", status));
    std::_Exit(status);
  }
  Runtime::set_for_process(nullptr);
  comm::finalize_world();
  // MPI would call a job that lost a rank a success if this one returned zero.
  if (comm::world_aborted()) std::_Exit(1);
}

/// How long processes wait for each other to come. Only torchrun's need it; for the others, an
/// error in the configuration shall be known to all ranks, so it is read when they have met.
std::chrono::milliseconds meeting_timeout(const Config& config) {
  const bool needed = comm::launcher() == comm::Launcher::kTorchrun;
  const double seconds = (needed ? config.merged_with_environment() : config).timeout_seconds();
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

int rank_in(CommGroup group) { return Runtime::get().rank_in(group); }
int size_of(CommGroup group) { return Runtime::get().topology().size(group); }

}  // namespace

void init(const Config& config) {
  SMP_CHECK_WITH(UsageError, !Runtime::exists(),
                 "smp::init was called twice; call it once at the start of main()");
  previous_terminate = std::set_terminate(&on_terminate);
  const auto world = comm::make_world(meeting_timeout(config));
  try {
    Runtime::set_for_process(std::make_shared<Runtime>(config, world, comm::world_hosts().names));
    if (Runtime::get().config().keep_freed_memory()) core::keep_freed_memory();
  } catch (const std::exception& error) {
    core::record_failure(world->rank(), error.what());
    throw;
  }
  static const bool registered = on_exit(&finish_at_exit, nullptr) == 0;
  SMP_INTERNAL_ASSERT(registered, "nothing would end MPI at exit");
}

void shutdown() {
  Runtime::set_for_process(nullptr);
  comm::finalize_world();
}

bool is_initialized() { return Runtime::exists(); }

bool is_tracing() { return Runtime::exists() && Runtime::get().tracing; }

void run_as_threads(int ranks, const Config& config, const std::function<void()>& program) {
  comm::run_ranks(ranks, [&](const comm::CommunicatorPtr& world) {
    const std::vector<std::string> hosts(ranks, "threads");
    const runtime::ThreadRuntime runtime(std::make_shared<Runtime>(config, world, hosts));
    program();
  });
}

void set_device(int index) {
  const auto type = at::getAccelerator();
  if (type && at::accelerator::deviceCount() > 0) at::accelerator::setDeviceIndex(index);
}

int rank() { return Runtime::get().rank(); }
int size() { return Runtime::get().world()->size(); }
int local_rank() { return Runtime::get().topology().local_rank(rank()); }
int local_size() { return Runtime::get().topology().local_size(rank()); }
int pp_rank() { return rank_in(CommGroup::kPp); }
int pp_size() { return size_of(CommGroup::kPp); }
int tp_rank() { return rank_in(CommGroup::kTp); }
int tp_size() { return size_of(CommGroup::kTp); }
int rdp_rank() { return rank_in(CommGroup::kRdp); }
int rdp_size() { return size_of(CommGroup::kRdp); }
int mp_rank() { return rank_in(CommGroup::kMp); }
int mp_size() { return size_of(CommGroup::kMp); }
int dp_rank() { return rank_in(CommGroup::kDp); }
int dp_size() { return size_of(CommGroup::kDp); }

std::vector<int> get_group(CommGroup group) {
  return Runtime::get().topology().members(group, rank());
}
std::vector<int> get_pp_group() { return get_group(CommGroup::kPp); }
std::vector<int> get_tp_group() { return get_group(CommGroup::kTp); }
std::vector<int> get_rdp_group() { return get_group(CommGroup::kRdp); }
std::vector<int> get_mp_group() { return get_group(CommGroup::kMp); }
std::vector<int> get_dp_group() { return get_group(CommGroup::kDp); }

c10::intrusive_ptr<c10d::ProcessGroup> get_world_process_group() {
  return Runtime::get().process_group(CommGroup::kWorld);
}
c10::intrusive_ptr<c10d::ProcessGroup> get_pp_process_group() {
  return Runtime::get().process_group(CommGroup::kPp);
}
c10::intrusive_ptr<c10d::ProcessGroup> get_tp_process_group() {
  return Runtime::get().process_group(CommGroup::kTp);
}
c10::intrusive_ptr<c10d::ProcessGroup> get_rdp_process_group() {
  return Runtime::get().process_group(CommGroup::kRdp);
}
c10::intrusive_ptr<c10d::ProcessGroup> get_mp_process_group() {
  return Runtime::get().process_group(CommGroup::kMp);
}
c10::intrusive_ptr<c10d::ProcessGroup> get_dp_process_group() {
  return Runtime::get().process_group(CommGroup::kDp);
}

void barrier(CommGroup group) { Runtime::get().group(group)->barrier(); }
void pp_barrier() { barrier(CommGroup::kPp); }
void tp_barrier() { barrier(CommGroup::kTp); }
void rdp_barrier() { barrier(CommGroup::kRdp); }
void mp_barrier() { barrier(CommGroup::kMp); }
void dp_barrier() { barrier(CommGroup::kDp); }

}  // namespace smp
