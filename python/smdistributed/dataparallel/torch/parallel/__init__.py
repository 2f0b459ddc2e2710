# SPDX-License-Identifier: Apache-2.0
"""Deprecated since smdistributed.dataparallel 1.4; not part of this package."""

raise ImportError(
    "smdistributed.dataparallel.torch.parallel is deprecated and not available: use "
    "torch.nn.parallel.DistributedDataParallel. Write "
    "`import smdistributed.dataparallel.torch.torch_smddp` and "
    '`torch.distributed.init_process_group(backend="smddp")` first.'
)
