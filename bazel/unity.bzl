# SPDX-License-Identifier: Apache-2.0
"""Sources of a target compiled several at a time, which halves the time of a clean build.

Each source of ours instantiates much the same templates of the standard library, which takes longer
than its own code does. `--define=unity=off` compiles each source alone.
"""

# More would save little, and a change compiles so many sources again.
SOURCES_IN_A_UNIT = 6

def _unit_impl(ctx):
    unit = ctx.actions.declare_file(ctx.label.name + ".cc")
    ctx.actions.write(unit, "".join(["#include \"%s\"\n" % source.path for source in ctx.files.srcs]))
    headers = CcInfo(compilation_context = cc_common.create_compilation_context(
        headers = depset(ctx.files.srcs + [unit]),
    ))
    return [DefaultInfo(files = depset([unit])), headers]

_unit = rule(
    implementation = _unit_impl,
    attrs = {"srcs": attr.label_list(allow_files = [".cc"])},
    doc = "A source that includes others.",
)

def in_units(name, srcs, alone = [], testonly = False):
    """Sources for a target `name`, and dependencies that they need.

    Args:
      name: of the target.
      srcs: its sources, maybe with headers among them.
      alone: those of them whose `using namespace` would reach the others.
      testonly: as of the target.

    Returns:
      Values of the attributes `srcs` and `deps`.
    """
    if type(srcs) != "list":
        return srcs, []  # a select
    sources = [source for source in srcs if source.endswith(".cc") and ":" not in source and source not in alone]
    if len(sources) < 2:
        return srcs, []
    others = [source for source in srcs if source not in sources]
    count = (len(sources) + SOURCES_IN_A_UNIT - 1) // SOURCES_IN_A_UNIT
    units = []
    for i in range(count):
        unit = "%s_unit_%d" % (name, i)
        _unit(
            name = unit,
            srcs = sources[i * len(sources) // count:(i + 1) * len(sources) // count],
            testonly = testonly,
            tags = ["manual"],
            visibility = ["//visibility:private"],
        )
        units.append(unit)
    return (
        select({"//bazel:separate": srcs, "//conditions:default": others + units}),
        select({"//bazel:separate": [], "//conditions:default": units}),
    )
