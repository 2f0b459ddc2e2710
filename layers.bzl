# SPDX-License-Identifier: Apache-2.0
"""Which folder may include which: the table of docs/architecture.md, "The folders".

A folder's BUILD files make its targets visible to those that may include it:

    load("//:layers.bzl", "visible_to_users_of")

    package(default_visibility = visible_to_users_of("graph"))

so that a target of a lower folder cannot depend on one of a higher folder, and what it includes of
there is an undeclared inclusion. //tests/layout:layout_test reads the same table, for includes that
pass by way of a dependency that is there for another reason.
"""

# The includes that each folder may have: folders, and single headers of others, whose targets say
# so themselves. Everything may include the headers of //smp:types.
LAYERS = {
    "core": [],
    "comm": ["core"],
    "graph": ["core"],
    "optim": ["core"],
    "checkpoint": ["core"],
    "exported": ["checkpoint", "core", "graph"],
    "partitioner": ["core", "graph"],
    "dp": ["comm", "core", "graph/absent.h", "graph/storage.h"],
    "pipeline": [
        "comm",
        "core",
        "dp/sharded_parameters.h",
        "dp/step_gradients.h",
        "graph",
        "partitioner",
    ],
    "nn": ["comm", "core", "graph"],
    "runtime": [
        "checkpoint",
        "comm",
        "core",
        "dp",
        "graph",
        "nn",
        "optim",
        "partitioner",
        "pipeline",
    ],
    "smp": [
        "checkpoint",
        "comm",
        "core",
        "dp",
        "exported",
        "graph",
        "nn",
        "optim",
        "partitioner",
        "pipeline",
        "runtime",
    ],
    "python": ["smp"],
    "tools": [
        "checkpoint",
        "core",
        "graph",
        "partitioner",
        "pipeline",
        "runtime/step/pipeline_choice.h",
        "smp",
    ],
    "examples": ["smp"],
}

# Folders that see everything.
_OBSERVERS = ["bench", "tests"]

def visible_to_users_of(folder):
    """The visibility of a folder's targets.

    Args:
      folder: a key of LAYERS.

    Returns:
      A list for the attribute `visibility`.
    """
    users = [user for user, used in LAYERS.items() if user == folder or folder in used]
    return ["//%s:__subpackages__" % user for user in users + _OBSERVERS]
