# SPDX-License-Identifier: Apache-2.0
"""The random numbers of an smp step, drawn in Python.

In a step each random operator draws from a generator of its own, which is seeded by (seed, name of
the step function, number of its call, global microbatch, ordinal of the operator): docs/capture.md,
"Random numbers". `KeyedInterpreter` runs `torch.export.load(...).module()` in this way, as
docs/smp_train.py does. Needs torch and xxhash.
"""

import contextlib
import dataclasses

import torch
import xxhash

_WORD = 2**64 - 1


def _mix(state):
    """SplitMix64."""
    state = (state + 0x9E3779B97F4A7C15) & _WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
    return state ^ (state >> 31)


@dataclasses.dataclass(frozen=True)
class RandomKey:
    """Names the stream of one call of a step function on one microbatch."""

    seed: int
    step_function: str
    call: int = 0
    global_microbatch: int = 0  # dp_rank * microbatches + microbatch

    def seed_of(self, ordinal):
        """Returns the seed of the random operator with that number in program order."""
        state = _mix(self.seed)
        name = xxhash.xxh64_intdigest(self.step_function.encode())
        for field in (name, self.call, self.global_microbatch, ordinal):
            state = _mix(state ^ field)
        return state


def is_random(target):
    """Whether an operator draws random numbers."""
    return (isinstance(target, torch._ops.OpOverload)
            and torch.Tag.nondeterministic_seeded in target.tags)


@contextlib.contextmanager
def seeded(seed):
    """Seeds the default generator, and restores it."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


class Ordinals:
    """Counts the random operators of a run."""

    def __init__(self):
        self.next = 0

    def take(self):
        self.next += 1
        return self.next - 1


class KeyedInterpreter(torch.fx.Interpreter):
    """Runs a program node by node, with the random numbers of a step.

    `on_random`, if there is one, is called with the ordinal before each random operator.
    """

    def __init__(self, module, key, on_random=None, ordinals=None):
        super().__init__(module)
        self.key = key
        self.on_random = on_random
        self.ordinals = ordinals or Ordinals()

    def call_function(self, target, args, kwargs):
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._call_region(target, args, kwargs)
        if not is_random(target):
            return super().call_function(target, args, kwargs)
        ordinal = self.ordinals.take()
        if self.on_random is not None:
            self.on_random(ordinal)
        with seeded(self.key.seed_of(ordinal)):
            return super().call_function(target, args, kwargs)

    def _call_region(self, target, args, kwargs):
        """Runs the functions of a region by this interpreter, too: its operators count on."""
        args = [self._runner(arg) if isinstance(arg, torch.fx.GraphModule) else arg for arg in args]
        if target.name().endswith("activation_checkpoint"):  # keeps less, and computes the same
            return args[0](*args[1:])
        return target(*args, **kwargs)

    def _runner(self, module):
        region = KeyedInterpreter(module, self.key, self.on_random, self.ordinals)
        return lambda *inputs: region.run(*inputs)
