# SPDX-License-Identifier: Apache-2.0
"""Rules for tests that include libtorch: they take its headers precompiled (//bazel:precompiled.bzl).

    load("//tests:precompiled.bzl", cc_library = "torch_cc_library", cc_test = "torch_cc_test")
"""

load("//bazel:precompiled.bzl", "with_precompiled")

# Tests run for seconds: optimising them costs more than it saves. The header and its users must
# agree on this.
TEST_COPTS = ["-O0", "-U_FORTIFY_SOURCE"]

def _with_prelude(rule, copts = [], **kwargs):
    with_precompiled(rule, "//tests:prelude.pch", copts = TEST_COPTS + copts, **kwargs)

def torch_cc_test(**kwargs):
    _with_prelude(native.cc_test, **kwargs)

def torch_cc_library(**kwargs):
    _with_prelude(native.cc_library, **kwargs)

def torch_cc_binary(**kwargs):
    _with_prelude(native.cc_binary, **kwargs)
