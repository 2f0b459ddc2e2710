# SPDX-License-Identifier: Apache-2.0
"""Registers "smddp" as a backend of torch.distributed:

    import smdistributed.dataparallel.torch.torch_smddp
    torch.distributed.init_process_group(backend="smddp")

Processes are started by torchrun, smprun or mpirun.
"""

import atexit
import os

import torch  # loads libtorch, which the extension uses
import torch.distributed

from smdistributed.dataparallel.torch.torch_smddp import _smddp


def _use_variables_of_mpirun():
    """Sets the variables that init_process_group reads, where mpirun has started the process."""
    if "OMPI_COMM_WORLD_SIZE" not in os.environ or "RANK" in os.environ:
        return
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        torchrun_name = name.replace("SIZE", "WORLD_SIZE")
        os.environ[torchrun_name] = os.environ["OMPI_COMM_WORLD_" + name]
    if os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:  # all on one host
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")


def _name_of_group(options):
    """The name in errors of the group being made; there is no default group before the first."""
    if not torch.distributed.is_initialized():
        return "world"
    return f"new_group {options.group_id} of ranks {list(options.global_ranks_in_group)}"


def _make_backend(options, _backend_options):
    return _smddp.make_backend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        _name_of_group(options),
    )


_use_variables_of_mpirun()
atexit.register(_smddp.before_interpreter_ends)
torch.distributed.Backend.register_backend(
    "smddp", _make_backend, extended_api=True, devices=["cpu", "cuda"]
)
