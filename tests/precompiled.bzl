# SPDX-License-Identifier: Apache-2.0
"""Rules for tests that include libtorch, on which their targets depend: they take its headers
precompiled (//bazel:precompiled.bzl). Tests take GoogleTest's main() as well.

    load("//tests:precompiled.bzl", cc_library = "torch_cc_library", cc_test = "torch_cc_test")
"""

load("//bazel:precompiled.bzl", "with_precompiled")

# Tests run for seconds: optimising them costs more than it saves. The header and its users must
# agree on this.
TEST_COPTS = ["-O0", "-U_FORTIFY_SOURCE"]

def _with_prelude(rule, copts = [], deps = [], common = ["@libtorch"], **kwargs):
    with_precompiled(
        rule,
        "//tests:prelude.pch",
        copts = TEST_COPTS + copts,
        deps = deps + [dep for dep in common if dep not in deps],
        **kwargs
    )

def torch_cc_test(**kwargs):
    _with_prelude(native.cc_test, common = ["@libtorch", "@system//:gtest_main"], **kwargs)

def torch_cc_library(testonly = True, **kwargs):
    _with_prelude(native.cc_library, testonly = testonly, **kwargs)

def torch_cc_binary(testonly = True, **kwargs):
    _with_prelude(native.cc_binary, testonly = testonly, **kwargs)
