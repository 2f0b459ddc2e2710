#include "comm/world.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "comm/mpi/mpi_communicator.h"
#include "comm/threads/thread_communicator.h"
#include "smp/core/error.h"

namespace smp::comm {
namespace {

CommunicatorPtr world_of_one() {
  static const CommunicatorPtr world = make_thread_world(1).front();
  return world;
}

std::string host_name() {
  std::array<char, 256> name{};
  // A name has at most HOST_NAME_MAX characters, 64.
  SMP_INTERNAL_ASSERT(gethostname(name.data(), name.size() - 1) == 0, std::strerror(errno));
  return name.data();
}

}  // namespace

CommunicatorPtr make_world() { return under_mpirun() ? make_mpi_world() : world_of_one(); }

void finalize_world() { finalize_mpi(); }

bool world_aborted() { return mpi_aborted(); }

WorldHosts world_hosts() {
  make_world();
  if (!under_mpirun()) {
    return {0, 1, {host_name()}};
  }
  return {mpi_local_rank(), mpi_local_size(), mpi_hosts()};
}

}  // namespace smp::comm
