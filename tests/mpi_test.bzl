"""Tests that run under mpirun."""

def smp_mpi_test(name, ranks, srcs, deps = [], seconds = 60, tags = [], **kwargs):
    """A GoogleTest program that runs on every rank of an MPI job.

    Its main() is //tests:mpi_main: the world is made before the first test, all ranks run all
    tests, and a failure on any rank fails the test.

    Args:
      name: name of the test. With a list of ranks: of a test suite of tests `name_N`.
      ranks: how many ranks, or a list of numbers to run the one program with each.
      srcs: sources of the program, without main().
      deps: what they need.
      seconds: when the test is ended by force.
      tags: further tags; the number of cores is added.
      **kwargs: passed to cc_binary.
    """
    program = name + "_program"
    native.cc_binary(
        name = program,
        testonly = True,
        srcs = srcs,
        deps = deps + ["//tests:mpi_main"],
        **kwargs
    )
    counts = ranks if type(ranks) == "list" else [ranks]
    tests = []
    for count in counts:
        test = "%s_%d" % (name, count) if type(ranks) == "list" else name
        native.sh_test(
            name = test,
            size = "small" if seconds <= 60 else "medium",
            srcs = ["//tests:mpi_test.sh"],
            args = [str(count), str(seconds), "$(location :%s)" % program],
            data = [":" + program],
            tags = tags + ["cpu:%d" % count],
        )
        tests.append(test)
    if type(ranks) == "list":
        native.test_suite(name = name, tests = tests)
