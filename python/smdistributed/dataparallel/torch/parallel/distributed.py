# SPDX-License-Identifier: Apache-2.0
"""Deprecated since smdistributed.dataparallel 1.4: use torch.nn.parallel.DistributedDataParallel."""

import warnings

import torch.nn.parallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

warnings.warn(
    "smdistributed.dataparallel.torch.parallel is deprecated: use "
    'torch.nn.parallel.DistributedDataParallel with the backend "smddp" '
    "(smdistributed.dataparallel.torch.torch_smddp).",
    DeprecationWarning,
    stacklevel=2,
)


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's, with the order of arguments that this one had; further ones by name are torch's."""

    def __init__(
        self,
        module,
        device_ids=None,
        output_device=None,
        broadcast_buffers=True,
        process_group=None,
        bucket_cap_mb=None,
        **options,
    ):
        super().__init__(
            module,
            device_ids=device_ids,
            output_device=output_device,
            broadcast_buffers=broadcast_buffers,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            **options,
        )
