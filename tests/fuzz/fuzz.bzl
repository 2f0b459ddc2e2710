# SPDX-License-Identifier: Apache-2.0
"""Fuzz targets: readers of untrusted files."""

def fuzz_target(name, deps):
    """NAME_fuzz.cc as a libFuzzer program, and a test that replays corpus/NAME.

    The program is built and run by fuzz.sh, with --config=fuzz, which instruments the readers too.
    """
    native.cc_library(
        name = name + "_target",
        testonly = True,
        srcs = [name + "_fuzz.cc"],
        alwayslink = True,
        deps = [":fuzz_target"] + deps,
    )
    native.cc_binary(
        name = name + "_fuzz",
        testonly = True,
        linkopts = ["-fsanitize=fuzzer"],
        tags = ["manual"],
        deps = [":" + name + "_target"],
    )
    native.cc_test(
        name = name + "_replay_test",
        size = "small",
        srcs = ["replay.cc"],
        args = ["tests/fuzz/corpus/" + name],
        data = native.glob(["corpus/" + name + "/**"]),
        deps = [
            ":fuzz_target",
            ":" + name + "_target",
        ],
    )
