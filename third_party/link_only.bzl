# SPDX-License-Identifier: Apache-2.0
"""A library of which dependents see nothing when they are compiled."""

def _link_only_impl(ctx):
    linking = [dep[CcInfo].linking_context for dep in ctx.attr.deps]
    return [cc_common.merge_cc_infos(cc_infos = [CcInfo(linking_context = one) for one in linking])]

link_only = rule(
    implementation = _link_only_impl,
    attrs = {"deps": attr.label_list(providers = [CcInfo])},
    doc = "Links `deps` into what depends on it and keeps their headers and flags away from it, so " +
          "that the rest is compiled as it is without them.",
)
