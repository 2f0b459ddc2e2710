// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/caller_ranks.h"

#include <mpi.h>

#include <algorithm>
#include <limits>

#include "comm/mpi/mpi_error.h"
#include "core/check.h"

namespace smp::comm {
namespace {

void check_may_call() {
  int initialized = 0, finalized = 0;
  check_mpi(MPI_Initialized(&initialized), "MPI_Initialized");
  check_mpi(MPI_Finalized(&finalized), "MPI_Finalized");
  SMP_CHECK_WITH(UsageError, initialized && !finalized, "a communicator was given, and MPI ",
                 initialized ? "has ended" : "has not started",
                 ". The program starts and ends MPI: begin a session between MPI_Init and "
                 "MPI_Finalize");
  int level = MPI_THREAD_SINGLE, is_main = 0;
  check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
  check_mpi(MPI_Is_thread_main(&is_main), "MPI_Is_thread_main");
  SMP_CHECK_WITH(UsageError, is_main || level > MPI_THREAD_FUNNELED,
                 "a session is begun on a communicator by a thread that may not call MPI: it was "
                 "started with thread level ",
                 level,
                 ". Begin the session on the thread that called MPI_Init, or start MPI with "
                 "MPI_THREAD_SERIALIZED");
}

MPI_Comm communicator_of(int64_t handle) {
  check_may_call();
  const bool fits = handle >= std::numeric_limits<MPI_Fint>::min() &&
                    handle <= std::numeric_limits<MPI_Fint>::max();
  const MPI_Comm none{};  // some MPIs make it of a handle that is none
  const MPI_Comm found = fits ? MPI_Comm_f2c(static_cast<MPI_Fint>(handle)) : none;
  SMP_CHECK_WITH(UsageError, found != none && found != MPI_COMM_NULL, "the number ", handle,
                 " is no handle of an MPI communicator. In C pass MPI_Comm_c2f(communicator), in "
                 "Fortran the communicator's integer (of the module mpi_f08: "
                 "communicator%MPI_VAL)");
  int has_two_groups = 0;
  check_mpi(MPI_Comm_test_inter(found, &has_two_groups), "MPI_Comm_test_inter");
  SMP_CHECK_WITH(UsageError, !has_two_groups,
                 "the ranks of a session are those of a communicator of one group, and this is an "
                 "intercommunicator. Merge its groups: MPI_Intercomm_merge");
  return found;
}

/// A communicator of our own, on which nothing that the program has under way is met.
class OwnCommunicator {
 public:
  explicit OwnCommunicator(MPI_Comm callers) {
    check_mpi(MPI_Comm_dup(callers, &own_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(own_, MPI_ERRORS_RETURN);
  }
  ~OwnCommunicator() { MPI_Comm_free(&own_); }
  OwnCommunicator(const OwnCommunicator&) = delete;
  OwnCommunicator& operator=(const OwnCommunicator&) = delete;

  MPI_Comm get() const { return own_; }

 private:
  MPI_Comm own_ = MPI_COMM_NULL;
};

}  // namespace

CallerRanks exchange_texts(int64_t communicator, const std::function<std::string(int rank)>& text) {
  const OwnCommunicator own(communicator_of(communicator));
  CallerRanks ranks;
  int size = 0;
  check_mpi(MPI_Comm_rank(own.get(), &ranks.rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(own.get(), &size), "MPI_Comm_size");
  constexpr int kBytes = kMostOfCallerText + 1;  // the last is 0
  std::vector<char> mine(kBytes), all(static_cast<size_t>(kBytes) * size);
  const std::string given = text(ranks.rank);
  std::copy_n(given.begin(), std::min(given.size(), kMostOfCallerText), mine.begin());
  check_mpi(MPI_Allgather(mine.data(), kBytes, MPI_CHAR, all.data(), kBytes, MPI_CHAR, own.get()),
            "MPI_Allgather");
  for (int rank = 0; rank < size; ++rank) {
    ranks.texts.emplace_back(all.data() + static_cast<size_t>(rank) * kBytes);
  }
  return ranks;
}

}  // namespace smp::comm
