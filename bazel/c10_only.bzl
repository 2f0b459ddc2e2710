# SPDX-License-Identifier: Apache-2.0
"""Link only c10 of libtorch's libraries, for programs that start often and use no tensor.

A program that loads libtorch_cpu takes a third of a second to register thousands of operators before
main(). What smprun shares with the library needs c10's errors and texts alone.
"""

def _is_needed(owner, library):
    return owner.workspace_name != "libtorch" or library.dynamic_library.basename == "libc10.so"

def _c10_only_impl(ctx):
    needed = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    inputs = []
    for one in needed.linking_context.linker_inputs.to_list():
        libraries = [library for library in one.libraries if _is_needed(one.owner, library)]
        inputs.append(cc_common.create_linker_input(
            owner = one.owner,
            libraries = depset(libraries, order = "topological"),
            user_link_flags = depset(one.user_link_flags),
            additional_inputs = depset(one.additional_inputs),
        ))
    return [CcInfo(
        compilation_context = needed.compilation_context,
        linking_context = cc_common.create_linking_context(
            linker_inputs = depset(inputs, order = "topological"),
        ),
    )]

c10_only = rule(
    implementation = _c10_only_impl,
    attrs = {"deps": attr.label_list(providers = [CcInfo])},
    doc = "What `deps` are, without the rest of libtorch when programs are linked: those that need " +
          "more do not link.",
)
