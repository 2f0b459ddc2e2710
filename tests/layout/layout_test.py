#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Includes go down the layers, and public headers reach nothing of the inside.

usage: layout_test.py COMPILED_HEADER...  (in the root of the sources; headers that a target
compiles alone)

Reads the table of layers.bzl. Then includes against the rules are added to the tree, and must be
found.
"""

import os
import re
import sys
import unittest

INCLUDE = re.compile(r'^\s*#include\s+(["<])([^">]+)[">]', re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
PUBLIC = "smp"
# libtorch; a header of the standard library has neither folder nor extension.
OUTSIDE = re.compile(r"(torch|ATen|c10)/.*|\w+")
# Public headers for users of something else, which they include.
NAMED_FOR = {"smp/mpi.h": "mpi.h", "smp/c.h": "stdint.h"}

COMPILED = set()


class Tree:
    """The sources in the working directory, with lines added to some."""

    def __init__(self, planted=None):
        self.planted = planted or {}
        layers = {}
        exec(self.read("layers.bzl"), layers)  # a dictionary and a function are Python, too
        self.layers = layers["LAYERS"]
        build = self.read(PUBLIC + "/BUILD.bazel")
        self.types = {PUBLIC + "/" + name for name in headers_of(build, "types", "hdrs")}
        self.files = sorted({
            os.path.join(folder, name)
            for layer in self.layers for folder, _, names in os.walk(layer)
            for name in names if name.endswith((".h", ".cc"))} | self.planted.keys())
        private = re.findall(r'"([\w/]+\.h)"', "".join(
            re.findall(r"srcs = \[(.*?)\]", build, re.DOTALL)))
        self.public = [path for path in self.files
                       if path.startswith(PUBLIC + "/") and path.endswith(".h")
                       and path[len(PUBLIC) + 1:] not in private]

    def read(self, path):
        text = self.planted.get(path, "")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                text = file.read() + text
        return text

    def includes(self, path):
        """Pairs of the delimiter and the name."""
        return INCLUDE.findall(self.read(path))


def headers_of(build, target, attribute):
    rule = re.search(r'name = "%s",(.*?)\n\)' % target, build, re.DOTALL).group(1)
    return re.findall(r'"([\w/]+\.h)"', re.search(attribute + r" = \[(.*?)\]", rule,
                                                  re.DOTALL).group(1))


def upward_includes(tree):
    """The includes that the table does not allow."""
    found = []
    for path in tree.files:
        folder = path.split("/")[0]
        for delimiter, name in tree.includes(path):
            target = name.split("/")[0]
            if delimiter == "<" or target == folder or name in tree.types:
                continue
            if target not in tree.layers[folder] and name not in tree.layers[folder]:
                found.append("%s includes %s" % (path, name))
    return found


def reached_internals(tree):
    """The headers that public ones reach besides public ones, libtorch and the standard library."""
    found = {}
    for header in tree.public:
        seen, waiting = {header}, [header]
        while waiting:
            for delimiter, name in tree.includes(waiting.pop()):
                if delimiter == '"' and name in tree.public:
                    waiting += [name] if name not in seen else []
                    seen.add(name)
                elif delimiter == '"' or not (OUTSIDE.fullmatch(name)
                                              or NAMED_FOR.get(header) == name):
                    found.setdefault(header, set()).add(name)
    return found


def closure(tree, header):
    """A public header and those that it reaches."""
    seen, waiting = {header}, [header]
    while waiting:
        for _, name in tree.includes(waiting.pop()):
            if name in tree.public and name not in seen:
                seen.add(name)
                waiting.append(name)
    return seen


def unnamed_headers(tree):
    """Public headers that smp/smp.h does not bring, and no header that docs/api.md names beside it;
    and those that it names in vain."""
    with open("docs/api.md", encoding="utf-8") as file:
        line = re.search(r"^Headers of their own: .*", file.read(), re.MULTILINE).group()
    beside = re.findall(r"`(smp/[\w/]+\.h)`", line)
    brought = closure(tree, "smp/smp.h")
    in_vain = {name for name in beside if name in brought or name not in tree.public}
    for name in beside:
        brought |= closure(tree, name)
    inner = ("smp/detail/", "smp/c/")
    return in_vain | {name for name in tree.public
                      if name not in brought and not name.startswith(inner)}


def never_first(tree):
    """Public headers that nothing shows to compile alone: no source includes them first, no target
    compiles them by themselves, and they are more than a list of includes and macros."""
    sources = [tree.includes(path) for path in tree.files if path.endswith(".cc")]
    shown = {includes[0][1] for includes in sources if includes} | COMPILED
    return [header for header in tree.public
            if header not in shown and holds_code(tree.read(header))]


def holds_code(text):
    text = re.sub(r"\\\n", "", INCLUDE.sub("", COMMENT.sub("", text)))
    return bool(re.sub(r"^#(define|pragma once).*", "", text, flags=re.MULTILINE).strip())


class LayoutTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.tree = Tree()

    def test_the_tree_is_there(self):
        for folder in self.tree.layers:
            self.assertTrue(any(path.startswith(folder + "/") for path in self.tree.files)
                            or folder == "python", folder)
        self.assertIn("smp/smp.h", self.tree.public)
        self.assertIn("smp/error.h", self.tree.types)

    def test_no_include_goes_up(self):
        self.assertEqual(upward_includes(self.tree), [])

    def test_public_headers_reach_nothing_internal(self):
        self.assertEqual(reached_internals(self.tree), {})

    def test_pages_say_which_header_brings_what(self):
        self.assertEqual(unnamed_headers(self.tree), set())

    def test_public_headers_compile_alone(self):
        self.assertEqual(never_first(self.tree), [])


class PlantedTest(unittest.TestCase):
    """An include against the rule is found wherever it stands."""

    def expect_upward(self, path, header):
        self.assertIn("%s includes %s" % (path, header),
                      upward_includes(Tree({path: '\n#include "%s"\n' % header})))

    def test_upward_includes(self):
        self.expect_upward("graph/graph.h", "partitioner/plan.h")
        self.expect_upward("core/planted.cc", "comm/communicator.h")
        self.expect_upward("nn/rewrite/planted.cc", "smp/tp_register.h")
        self.expect_upward("pipeline/planted.cc", "runtime/runtime.h")
        self.expect_upward("dp/planted.h", "graph/graph.h")
        self.expect_upward("tools/planted.cc", "runtime/runtime.h")
        self.expect_upward("examples/hello/planted.cc", "core/check.h")

    def test_what_public_headers_reach(self):
        for name in ('"core/check.h"', "<nlohmann/json.hpp>", "<sys/mman.h>"):
            found = reached_internals(Tree({"smp/error.h": "\n#include %s\n" % name}))
            self.assertIn(name[1:-1], found.get("smp/error.h", []))
            self.assertIn(name[1:-1], found.get("smp/smp.h", []))

    def test_headers_that_no_page_names(self):
        self.assertEqual(unnamed_headers(Tree({"smp/planted.h": "int planted();\n"})),
                         {"smp/planted.h"})
        self.assertEqual(unnamed_headers(Tree({"smp/smp.h": '\n#include "smp/ddp.h"\n'})),
                         {"smp/ddp.h"})

    def test_headers_that_nothing_compiles_alone(self):
        self.assertEqual(never_first(Tree({"smp/planted.h": "int planted();\n"})),
                         ["smp/planted.h"])


if __name__ == "__main__":
    COMPILED = set(sys.argv[1:])
    unittest.main(argv=sys.argv[:1])
