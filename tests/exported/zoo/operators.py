# SPDX-License-Identifier: Apache-2.0
"""The kernels that a model runs, to find the first in which two runs differ."""

import hashlib

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import reference
import smp_streams as streams


class DrawLog(TorchDispatchMode):
    """Notes which random operators of a program draw, and how many kernels they draw by."""

    def __init__(self):
        super().__init__()
        self.draws = []  # the ordinal of an operator at the kernel's first, else None
        self._ordinal = None

    def on_random(self, ordinal):
        self._ordinal = ordinal

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if streams.is_random(func):
            self.draws.append(self._ordinal)
            self._ordinal = None
        return func(*args, **(kwargs or {}))


class KeyedKernels(TorchDispatchMode):
    """Gives the random kernels of an eager model the numbers that the program's would draw."""

    def __init__(self, draws, key):
        super().__init__()
        self._draws = iter(draws)
        self._key = key

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if streams.is_random(func):
            ordinal = next(self._draws, None)
            if ordinal is not None:
                torch.default_generator.manual_seed(self._key.seed_of(ordinal))
        return func(*args, **(kwargs or {}))


def _is_idle(func):
    """Views, memory without numbers, and the checks that an export adds."""
    return (func.is_view or func is torch.ops.aten.detach.default or not func._schema.returns
            or "empty" in func._schema.name)


class KernelLog(TorchDispatchMode):
    """Notes name and results of kernels, but of idle ones."""

    def __init__(self):
        super().__init__()
        self.kernels = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not _is_idle(func):
            digest = hashlib.blake2b(digest_size=8)
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    digest.update(reference.bytes_of(leaf))
            self.kernels.append((str(func), digest.hexdigest()))
        return result


def first_difference(eager, program):
    """Says in words where two lists of kernels part; None if they do not."""
    for i, (one, other) in enumerate(zip(eager, program)):
        if one[0] != other[0]:
            return f"kernel {i}: {one[0]}, and the program has {other[0]}"
        if one[1] != other[1]:
            return f"kernel {i}: {one[0]} gives other bits"
    if len(eager) != len(program):
        return f"{len(eager)} kernels, and the program has {len(program)}"
    return None
