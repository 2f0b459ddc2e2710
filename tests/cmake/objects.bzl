# SPDX-License-Identifier: Apache-2.0
"""The object files of libraries, for a link that is not Bazel's."""

def _objects_impl(ctx):
    objects = []
    for dep in ctx.attr.deps:
        for linker_input in dep[CcInfo].linking_context.linker_inputs.to_list():
            for library in linker_input.libraries:
                objects += library.pic_objects or []
    return [DefaultInfo(files = depset(objects), runfiles = ctx.runfiles(files = objects))]

objects = rule(
    implementation = _objects_impl,
    attrs = {"deps": attr.label_list(providers = [CcInfo])},
    doc = "The position-independent objects of `deps` and of all that they depend on.",
)
