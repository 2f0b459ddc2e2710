# SPDX-License-Identifier: Apache-2.0
"""SageMaker's data-parallel package, as far as `smp` has it: the backend "smddp"."""
