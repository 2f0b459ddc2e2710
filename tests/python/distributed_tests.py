# SPDX-License-Identifier: Apache-2.0
"""Runs torch's own tests of torch.distributed (torch/testing/_internal/distributed) with the backend
smddp, each on ranks of its own, and prints what passes, fails and is skipped as Markdown.

    bazel run //tests/python:distributed_tests -- --ranks 2

Many of these tests say by the name of the backend whether they are to be run. smddp is added to the
backends that have subgroups and DistributedDataParallel. With --as gloo (or mpi) other conditions
take smddp for that one, and what they check of its results is checked, too.
"""

import argparse
import collections
import os
import re
import sys
import tempfile
import types
import unittest

MODULE = "torch.testing._internal.distributed.distributed_test"


class Alias(str):
    """A backend's name that the conditions of the tests take for another one."""

    def __new__(cls, name, taken_for):
        alias = super().__new__(cls, name)
        alias.taken_for = taken_for
        return alias

    def __eq__(self, other):
        return other == self.taken_for or str.__eq__(self, other)

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(self.taken_for)


def load_tests(backend, taken_for):
    """torch's module of tests, with that backend."""
    import torch  # noqa: F401
    import torch.distributed as dist

    if backend == "smddp":
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
    import importlib.util

    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add(backend)
    spec = importlib.util.find_spec(MODULE)
    with open(spec.origin, encoding="utf-8") as file:
        source = file.read()
    line = 'BACKEND = os.environ["BACKEND"]'
    assert source.count(line) == 1
    module = types.ModuleType(MODULE)
    module.__file__ = spec.origin
    module._BACKEND = Alias(backend, taken_for)
    sys.modules[MODULE] = module
    exec(compile(source.replace(line, "BACKEND = _BACKEND"), spec.origin, "exec"), vars(module))
    if taken_for != backend:
        for known in (
            module.PROFILING_SUPPORTED_BACKENDS,
            module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
        ):
            known.append(dist.Backend(backend))
    return module


def make_case(module):
    """The tests, whose ranks are forks of this process: they need not import torch again."""
    import torch

    class DistributedTests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return DistributedTests


class Result(unittest.TestResult):
    """Says each result at once, and keeps the reasons."""

    def __init__(self):
        super().__init__()
        self.reasons = {kind: collections.OrderedDict() for kind in ("passed", "failed", "skipped")}

    def note(self, kind, test, reason=""):
        name = test._testMethodName
        self.reasons[kind][name] = reason
        print(f"{kind:8}{name} {reason}", file=sys.stderr, flush=True)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.note("passed", test)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.note("skipped", test, reason)

    def addError(self, test, error):
        super().addError(test, error)
        self.note("failed", test, reason_of(str(error[1])))

    addFailure = addError


def reason_of(text):
    """The line of a traceback that tells the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failure)\b", line)]
    return (named or lines or ["no text"])[-1][:300]


def report(result, options):
    alias = f" taken for {options.taken_for}" if options.taken_for else ""
    numbers = [f"{len(found)} {kind}" for kind, found in result.reasons.items()]
    print(f"\n## {options.backend}{alias}, {options.ranks} ranks: {', '.join(numbers)}\n")
    for name, reason in result.reasons["failed"].items():
        print(f"- failed: `{name}`: {reason}")
    by_reason = collections.defaultdict(list)
    for name, reason in result.reasons["skipped"].items():
        by_reason[reason].append(name)
    for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        print(f"- {len(names)} skipped: {reason}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="smddp")
    parser.add_argument("--as", dest="taken_for", choices=["gloo", "mpi"])
    parser.add_argument("--seconds", type=int, default=60, help="that one test may take")
    parser.add_argument("only", nargs="*", help="tests; otherwise all")
    options = parser.parse_args()
    folder = tempfile.mkdtemp()
    os.environ.update(
        BACKEND=options.backend,
        WORLD_SIZE=str(options.ranks),
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(options.seconds),
        TEMP_DIR=folder,
        INIT_METHOD=f"file://{folder}/init",
        OMP_NUM_THREADS="1",
    )
    case = make_case(load_tests(options.backend, options.taken_for or options.backend))
    names = unittest.defaultTestLoader.getTestCaseNames(case)
    result = Result()
    unittest.TestSuite(case(name) for name in options.only or names).run(result)
    report(result, options)


if __name__ == "__main__":
    main()
