# SPDX-License-Identifier: Apache-2.0
"""Registers "smddp" as a backend of torch.distributed:

    import smdistributed.dataparallel.torch.torch_smddp
    torch.distributed.init_process_group(backend="smddp")

Processes are started by torchrun, smprun or mpirun.
"""

import os

import torch  # loads libtorch, which the extension uses
import torch.distributed

from smdistributed.dataparallel.torch.torch_smddp import _smddp


def _use_variables_of_mpirun():
    """Sets what init_process_group reads, where mpirun has started the process."""
    if "OMPI_COMM_WORLD_SIZE" not in os.environ or "RANK" in os.environ:
        return
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        torchrun_name = name.replace("SIZE", "WORLD_SIZE")
        os.environ[torchrun_name] = os.environ["OMPI_COMM_WORLD_" + name]
    if os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:  # all on one host
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "29500")


def _make_backend(store, rank, size, timeout):
    return _smddp.make_backend(store, rank, size, timeout)


_use_variables_of_mpirun()
torch.distributed.Backend.register_backend("smddp", _make_backend, devices=["cpu"])
