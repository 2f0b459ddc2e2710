# SPDX-License-Identifier: Apache-2.0
"""Deprecated since smdistributed.dataparallel 1.4: for the calls of older scripts, on the backend
"smddp" of torch.distributed. Use that instead:

    import smdistributed.dataparallel.torch.torch_smddp
    torch.distributed.init_process_group(backend="smddp")
"""

import os
import warnings

import torch.distributed as _dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

warnings.warn(
    "smdistributed.dataparallel.torch.distributed is deprecated: use torch.distributed with the "
    'backend "smddp" (smdistributed.dataparallel.torch.torch_smddp).',
    DeprecationWarning,
    stacklevel=2,
)

# Those of torch.distributed.
all_gather = _dist.all_gather
all_to_all_single = _dist.all_to_all_single
barrier = _dist.barrier
broadcast = _dist.broadcast
get_rank = _dist.get_rank
get_world_size = _dist.get_world_size
group = _dist.group
is_available = _dist.is_available
is_initialized = _dist.is_initialized
reduce = _dist.reduce


class ReduceOp:
    """The reductions, under the names that they had."""

    SUM = _dist.ReduceOp.SUM
    AVERAGE = _dist.ReduceOp.AVG
    MIN = _dist.ReduceOp.MIN
    MAX = _dist.ReduceOp.MAX


def init_process_group(**options):
    """Joins the processes; options are those of torch's call, but for the backend."""
    _dist.init_process_group(backend="smddp", **options)


def get_local_rank():
    """This process's number among those of its host."""
    return int(os.environ["LOCAL_RANK"])


def get_local_size():
    """How many processes this host has."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """Replaces `tensor` by the reduction over all ranks."""
    return _dist.all_reduce(tensor, op, group, async_op)
