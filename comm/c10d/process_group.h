#pragma once

#include <c10/util/intrusive_ptr.h>

#include "comm/communicator.h"

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace smp::comm {

/// A process group for libtorch's own distributed code (`c10d::Reducer` and the like) over a
/// communicator; its backend is called "smp". Collective over `group`, which is not disturbed: the
/// process group talks in a split of its own.
///
/// Has all-reduce (also coalesced), broadcast, all-gather, reduce-scatter, reduce, gather, scatter,
/// all-to-all, send, recv and barrier on contiguous CPU tensors, with all reductions but
/// PREMUL_SUM; anything else throws with its name. Sums are in rank order. Works of collectives
/// complete in the background and have futures; those of send and recv have none. The
/// communicator's time-out applies to every wait (setTimeout changes it), whatever time-out the
/// call's options name.
///
/// Include <torch/csrc/distributed/c10d/ProcessGroup.hpp> to use the result.
c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const CommunicatorPtr& group);

}  // namespace smp::comm
