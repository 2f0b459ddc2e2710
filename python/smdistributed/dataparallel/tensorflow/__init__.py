# SPDX-License-Identifier: Apache-2.0
"""Deprecated by SageMaker; not part of this package."""

raise ImportError(
    "smdistributed.dataparallel.tensorflow is deprecated and not available: use PyTorch with the "
    'backend "smddp" (smdistributed.dataparallel.torch.torch_smddp).'
)
