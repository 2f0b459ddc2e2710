#pragma once

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <vector>

#include "smp/comm_group.h"
#include "smp/config.h"

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace smp {

/// Sets up this rank: reads the configuration (the environment variable SM_HP_MP_PARAMETERS wins
/// over a file, a file over the program), joins the other ranks and forms the groups. The first
/// call of a program; collective. Under mpirun the ranks are the processes; otherwise the process
/// is a world of one. Throws `ConfigError`, and `UsageError` at a second call.
void init(const Config& config = Config());

/// Ends what `init` began; collective. Without it, that happens at the end of the program. A
/// program that ends with a non-zero status without it ends the other ranks too.
void shutdown();

/// True between `init` and `shutdown`.
bool is_initialized();

/// True inside the step function in the first step of the program, which captures it on data; later
/// runs of the function go over shapes only.
bool is_tracing();

/// Plays `ranks` ranks as threads of this process, each with a runtime of its own, and calls
/// `program` on each; for tests and for debugging without mpirun. Rethrows the first exception.
/// Set torch::set_num_threads(1) before, or the ranks compete for cores.
void run_as_threads(int ranks, const Config& config, const std::function<void()>& program);

/// Makes GPU `index` the current one of this thread; on a machine without GPUs there is nothing to
/// choose and this returns. Models and inputs are moved by the program: docs/cuda.md.
void set_device(int index);

/// This rank's number in the world, on its host, and in its groups, with the sizes of those. The
/// numbering is described with `placement_strategy` in docs/configuration.md.
int rank();
int size();
int local_rank();
int local_size();
int pp_rank();
int pp_size();
int tp_rank();
int tp_size();
int rdp_rank();
int rdp_size();
int mp_rank();
int mp_size();
int dp_rank();
int dp_size();

/// The world ranks of this rank's group, ascending.
std::vector<int> get_group(CommGroup group);
std::vector<int> get_pp_group();
std::vector<int> get_tp_group();
std::vector<int> get_rdp_group();
std::vector<int> get_mp_group();
std::vector<int> get_dp_group();

/// libtorch process groups of the ranks of this rank's groups, for `c10d` collectives on CPU
/// tensors. Collective over the group at the first call. Include
/// <torch/csrc/distributed/c10d/ProcessGroup.hpp> to use them.
c10::intrusive_ptr<c10d::ProcessGroup> get_world_process_group();
c10::intrusive_ptr<c10d::ProcessGroup> get_pp_process_group();
c10::intrusive_ptr<c10d::ProcessGroup> get_tp_process_group();
c10::intrusive_ptr<c10d::ProcessGroup> get_rdp_process_group();
c10::intrusive_ptr<c10d::ProcessGroup> get_mp_process_group();
c10::intrusive_ptr<c10d::ProcessGroup> get_dp_process_group();

/// Returns when all ranks of this rank's group have called it.
void barrier(CommGroup group = CommGroup::kWorld);
void pp_barrier();
void tp_barrier();
void rdp_barrier();
void mp_barrier();
void dp_barrier();

}  // namespace smp
