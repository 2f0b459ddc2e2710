# SPDX-License-Identifier: Apache-2.0
"""Tests whose ranks are processes."""

load("//tests:precompiled.bzl", "torch_cc_binary")

def smp_mpi_test(name, ranks, srcs, deps = [], seconds = 240, tags = [], **kwargs):
    """A GoogleTest program that runs on every rank of an MPI job.

    Its main() is //tests:rank_main: the world is made before the first test, all ranks run all
    tests, and a failure on any rank fails the test.

    Args:
      name: name of the test. With a list of ranks: of a test suite of tests `name_N`.
      ranks: how many ranks, or a list of numbers to run the one program with each.
      srcs: sources of the program, without main().
      deps: what they need.
      seconds: when the test is ended by force: far more than it takes on a busy machine.
      tags: of the test.
      **kwargs: passed to cc_binary.
    """
    program = name + "_program"
    torch_cc_binary(
        name = program,
        srcs = srcs,
        deps = deps + ["//tests:rank_main"],
        **kwargs
    )
    _launched_test(name, "//tests:mpi_test.sh", program, ranks, seconds, tags)

def smp_torchrun_test(name, program, ranks, seconds = 240, tags = []):
    """The program of an smp_mpi_test, on processes that have the variables that torchrun sets.

    Args:
      name: name of the test or, with a list of ranks, of the suite.
      program: the name of an smp_mpi_test with "_program" added to it.
      ranks: as above.
      seconds: as above.
      tags: as above.
    """
    _launched_test(name, "//tests:torchrun_test.sh", program, ranks, seconds, tags)

def _launched_test(name, launcher, program, ranks, seconds, tags):
    counts = ranks if type(ranks) == "list" else [ranks]
    tests = []
    for count in counts:
        test = "%s_%d" % (name, count) if type(ranks) == "list" else name
        native.sh_test(
            name = test,
            size = "medium",
            srcs = [launcher],
            args = [str(count), str(seconds), "$(location :%s)" % program],
            data = [":" + program],
            tags = tags,
        )
        tests.append(test)
    if type(ranks) == "list":
        native.test_suite(name = name, tests = tests)
