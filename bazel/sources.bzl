# SPDX-License-Identifier: Apache-2.0
"""The sources of a folder as files that tests of the tree read: its errors, includes and names."""

# The folders of the library and its tools.
PRODUCT = [
    "checkpoint",
    "comm",
    "core",
    "dp",
    "exported",
    "graph",
    "nn",
    "nn/rewrite",
    "optim",
    "partitioner",
    "pipeline",
    "runtime",
    "smp",
    "tools",
    "tools/train",
]

def sources_of(folders):
    """Their sources, as labels."""
    return ["//%s:sources" % folder for folder in folders]

def sources(patterns = ["**/*.cc", "**/*.h"]):
    """Declares the target `sources`.

    Args:
      patterns: which files of the package are sources.
    """
    native.filegroup(
        name = "sources",
        srcs = native.glob(patterns),
        visibility = ["//tests:__subpackages__"],
    )
