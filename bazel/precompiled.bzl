# SPDX-License-Identifier: Apache-2.0
"""Headers that most sources include, compiled once: parsing libtorch's headers takes two
thirds of each file's time.

A BUILD file whose sources include libtorch loads this in place of Bazel's own rule:

    load("//bazel:precompiled.bzl", cc_library = "torch_cc_library")

one of programs that measure `program_cc_library` and `program_cc_binary` in the same way, one of
examples `example_cc_library` and `example_cc_binary`, and one of tests the rules of
//tests:precompiled.bzl. Only clang reads the precompiled header; with
--config=gcc the same files compile without it, so every source still includes what it uses.
"""

load("@bazel_tools//tools/build_defs/cc:action_names.bzl", "ACTION_NAMES")
load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load(":unity.bzl", "in_units")

def _precompiled_header_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    needed = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    context = needed.compilation_context
    output = ctx.actions.declare_file(ctx.label.name)
    variables = cc_common.create_compile_variables(
        feature_configuration = features,
        cc_toolchain = toolchain,
        source_file = ctx.file.hdr.path,
        output_file = output.path,
        user_compile_flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts +
                             ["-x", "c++-header", "-fpch-instantiate-templates"] +
                             # A header that is fetched again has another date, but is the same.
                             ["-Xclang", "-fno-pch-timestamp"],
        include_directories = context.includes,
        quote_include_directories = context.quote_includes,
        system_include_directories = context.system_includes,
        preprocessor_defines = context.defines,
        use_pic = True,
    )
    action = ACTION_NAMES.cpp_compile
    ctx.actions.run(
        executable = cc_common.get_tool_for_action(
            feature_configuration = features,
            action_name = action,
        ),
        arguments = cc_common.get_memory_inefficient_command_line(
            feature_configuration = features,
            action_name = action,
            variables = variables,
        ),
        env = cc_common.get_environment_variables(
            feature_configuration = features,
            action_name = action,
            variables = variables,
        ),
        inputs = depset([ctx.file.hdr], transitive = [context.headers, toolchain.all_files]),
        outputs = [output],
        mnemonic = "CppPrecompile",
        # It names the headers by their absolute paths, which are not those of another output base.
        execution_requirements = {"no-remote-cache": "1", "no-cache": "1"},
        progress_message = "Precompiling %s" % ctx.file.hdr.short_path,
    )
    header = CcInfo(compilation_context = cc_common.create_compilation_context(
        headers = depset([output, ctx.file.hdr]),
    ))
    return [
        DefaultInfo(files = depset([output])),
        cc_common.merge_cc_infos(cc_infos = [header, needed]),
    ]

precompiled_header = rule(
    implementation = _precompiled_header_impl,
    attrs = {
        "hdr": attr.label(allow_single_file = [".h"], mandatory = True),
        "copts": attr.string_list(doc = "Those of the sources that read it."),
        "deps": attr.label_list(providers = [CcInfo]),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    doc = "A header compiled as clang's -include-pch reads it, and what it takes to use it.",
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def with_precompiled(rule, header, name, srcs = [], alone = [], deps = [], copts = [], **kwargs):
    """Calls `rule` for sources that are compiled after `header`, a label of a precompiled_header.

    Args:
      rule: one of Bazel's for C++.
      header: the label.
      name: of the target.
      srcs: sources, compiled in units (unity.bzl).
      alone: those of them that are not.
      deps: as of `rule`.
      copts: as of `rule`.
      **kwargs: as of `rule`.
    """
    units, sources = in_units(name, srcs, alone, kwargs.get("testonly", rule == native.cc_test))
    rule(
        name = name,
        srcs = units,
        copts = copts + select({
            "//bazel:clang": ["-include-pch", "$(BINDIR)/" + header[2:].replace(":", "/")],
            "//conditions:default": [],
        }),
        deps = deps + sources + select({
            "//bazel:clang": [header],
            "//conditions:default": [],
        }),
        **kwargs
    )

def torch_cc_library(**kwargs):
    with_precompiled(native.cc_library, "//bazel:library.pch", **kwargs)

def torch_cc_binary(**kwargs):
    with_precompiled(native.cc_binary, "//bazel:library.pch", **kwargs)

def program_cc_library(**kwargs):
    with_precompiled(native.cc_library, "//bazel:program.pch", **kwargs)

def program_cc_binary(**kwargs):
    with_precompiled(native.cc_binary, "//bazel:program.pch", **kwargs)

# Examples spend their time in libtorch and in the library, and optimising libtorch's inline functions
# takes most of the time that they take to compile. The header and its users must agree on this.
EXAMPLE_COPTS = ["-O0", "-U_FORTIFY_SOURCE"]

def example_cc_library(copts = [], **kwargs):
    with_precompiled(native.cc_library, "//bazel:example.pch", copts = EXAMPLE_COPTS + copts, **kwargs)

def example_cc_binary(copts = [], **kwargs):
    with_precompiled(native.cc_binary, "//bazel:example.pch", copts = EXAMPLE_COPTS + copts, **kwargs)
