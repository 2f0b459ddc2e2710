// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/mpi_communicator.h"

#include <mpi.h>

#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/final_barrier.h"
#include "comm/mpi/mpi_error.h"
#include "comm/mpi/mpi_transport.h"
#include "comm/transport_communicator.h"
#include "core/env.h"
#include "core/failure.h"
#include "core/host.h"

namespace smp::comm {
namespace {

// MPI exists once in a process, and so does this. When the process ends without finalize_mpi(),
// the progress thread ends here, before the objects that it uses.
struct MpiJob {
  std::shared_ptr<MpiTransport> transport;
  CommunicatorPtr world;
  WorldHosts hosts;
  bool initialized_here = false;
  bool finalized = false;

  ~MpiJob() {
    if (transport) {
      transport->stop_thread();
    }
  }
};

MpiJob& job() {
  static MpiJob instance;
  return instance;
}

// Open MPI moves a long message in fragments, at most a few each time that it is polled: with our
// pauses between polls that would be 0.3 GB/s. With 128 fragments it is 5 GB/s (both measured on
// one host, 32 KiB fragments). A parameter set by the user (mpirun --mca) keeps its value.
void widen_pipeline() { setenv("OMPI_MCA_pml_ob1_send_pipeline_depth", "128", /*overwrite=*/0); }

// The rank that mpirun or srun has given this process; MPI cannot be asked yet.
int rank_by_environment() {
  const auto rank = core::env("OMPI_COMM_WORLD_RANK");
  return std::atoi(rank.value_or(core::env("PMIX_RANK").value_or("0")).c_str());
}

// Ends the process if MPI has not started, or ended, in time: its calls have no time-out, and
// cannot be taken back.
class MpiWatch {
 public:
  // The process that owns it, and the text that it then writes.
  MpiWatch(std::chrono::milliseconds timeout, int rank, std::string message)
      : rank_(rank), message_(std::move(message)), thread_([this, timeout] { watch(timeout); }) {}
  MpiWatch(const MpiWatch&) = delete;
  MpiWatch& operator=(const MpiWatch&) = delete;
  ~MpiWatch() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

 private:
  void watch(std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (changed_.wait_for(lock, timeout, [this] { return is_over_; })) {
      return;
    }
    core::record_failure(rank_, message_);
    if (!core::is_recorded(message_)) {
      std::cerr << message_ << std::endl;
    }
    std::_Exit(1);
  }

  const int rank_;
  const std::string message_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  std::thread thread_;  // last, since it uses the others
};

// True when MPI was not initialised before by other code.
bool initialize_mpi() {
  int initialized = 0;
  check_mpi(MPI_Initialized(&initialized), "MPI_Initialized");
  int provided = MPI_THREAD_SINGLE;
  if (initialized) {
    check_mpi(MPI_Query_thread(&provided), "MPI_Query_thread");
  } else {
    widen_pipeline();
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  }
  SMP_CHECK_WITH(
      CommError, provided == MPI_THREAD_MULTIPLE, "MPI offers thread level ", provided,
      ", expected MPI_THREAD_MULTIPLE (", MPI_THREAD_MULTIPLE,
      "). Use an MPI built with thread support (ompi_info | grep -i thread shows it), and "
      "let smp initialise MPI or ask for that level yourself.");
  return !initialized;
}

void check_tags() {
  void* value = nullptr;
  int found = 0;
  check_mpi(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &value, &found), "MPI_Comm_get_attr");
  constexpr int kNeeded = 2 * (kMaxTag + 1) - 1;
  SMP_CHECK_WITH(CommError, found && *static_cast<int*>(value) >= kNeeded, "MPI allows tags up to ",
                 found ? *static_cast<int*>(value) : 0, ", expected ", kNeeded,
                 ". Choose another transport, for example mpirun --mca pml ob1.");
}

// The ranks of this host, and whether there is a core for each: mpirun may have given each rank
// cores of its own.
LocalRanks find_local_ranks(WorldHosts& hosts) {
  MPI_Comm local;
  check_mpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local),
            "MPI_Comm_split_type");
  check_mpi(MPI_Comm_rank(local, &hosts.local_rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(local, &hosts.local_size), "MPI_Comm_size");
  int rank = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  LocalRanks ranks;
  ranks.world_ranks.resize(hosts.local_size);
  check_mpi(MPI_Allgather(&rank, 1, MPI_INT, ranks.world_ranks.data(), 1, MPI_INT, local),
            "MPI_Allgather");
  cpu_set_t cores = core::cores_of_this_process();
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &cores, sizeof cores, MPI_BYTE, MPI_BOR, local),
            "MPI_Allreduce");
  ranks.has_core_for_each = hosts.local_size <= CPU_COUNT(&cores);
  check_mpi(MPI_Comm_free(&local), "MPI_Comm_free");
  return ranks;
}

std::shared_ptr<GroupState> mpi_world_group() {
  int rank = 0;
  int size = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  return world_group(rank, size);
}

}  // namespace

bool under_mpirun() { return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr; }

CommunicatorPtr make_mpi_world(std::chrono::milliseconds timeout) {
  MpiJob& job = smp::comm::job();
  SMP_CHECK_WITH(UsageError, !job.finalized,
                 "make_mpi_world after finalize_mpi: MPI can be started only once in a process.");
  if (job.world) {
    return job.world;
  }
  const int rank = rank_by_environment();
  const std::string message = c10::str(
      "[smp rank ", rank, "] MPI has not started within ", timeout.count() / 1000.0,
      " s: a rank of the job has not come to smp::init, or is stopped. See what the other ranks do "
      "(ps), or raise \"timeout_seconds\".");
  const MpiWatch watch(timeout, rank, message);
  job.initialized_here = initialize_mpi();
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_tags();
  job.transport = std::make_shared<MpiTransport>(find_local_ranks(job.hosts));
  job.world = std::make_shared<TransportCommunicator>(job.transport, mpi_world_group());
  job.hosts.names = all_gather_bytes(*job.world, core::host_name());
  return job.world;
}

void finalize_mpi() {
  MpiJob& job = smp::comm::job();
  if (!job.world || job.finalized) {
    return;
  }
  job.finalized = true;
  const auto timeout = job.world->timeout();
  const std::exception_ptr late = final_barrier(*job.world);
  job.transport->stop_thread();
  if (late) {
    std::rethrow_exception(late);
  }
  if (mpi_aborted()) {
    return;
  }
  const std::string message = c10::str(
      "[smp rank ", job.world->rank(), "] MPI has not ended within ", timeout.count() / 1000.0,
      " s: all ranks have come to the end of the program, but one has stopped there, or has closed "
      "file descriptors that are MPI's (closefrom, close_range). Close those that your program has "
      "opened.");
  const MpiWatch watch(timeout, job.world->rank(), message);
  job.transport->close();
  if (job.initialized_here) {
    check_mpi(MPI_Finalize(), "MPI_Finalize");
  }
}

bool mpi_aborted() { return job().transport && job().transport->aborted(); }

const WorldHosts& mpi_hosts() {
  SMP_CHECK_WITH(UsageError, job().world != nullptr,
                 "mpi_hosts needs a started MPI. Call make_mpi_world() first.");
  return job().hosts;
}

}  // namespace smp::comm
