# SPDX-License-Identifier: Apache-2.0
"""Deprecated since smdistributed.dataparallel 1.4: use torch.nn.parallel.DistributedDataParallel."""

from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
