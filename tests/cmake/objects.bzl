# SPDX-License-Identifier: Apache-2.0
"""The object files of libraries, for a link that is not Bazel's."""

def _objects_impl(ctx):
    objects, units = [], []
    for dep in ctx.attr.deps:
        for linker_input in dep[CcInfo].linking_context.linker_inputs.to_list():
            for library in linker_input.libraries:
                objects += library.pic_objects or []
        headers = dep[CcInfo].compilation_context.headers.to_list()
        units += [header for header in headers if "_unit_" in header.basename]
    return [DefaultInfo(files = depset(objects), runfiles = ctx.runfiles(files = objects + units))]

objects = rule(
    implementation = _objects_impl,
    attrs = {"deps": attr.label_list(providers = [CcInfo])},
    doc = """The position-independent objects of `deps` and of all that they depend on; with them, to be
    read, the units of which some are made (//bazel:unity.bzl).""",
)
