#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every source begins with the line that names its licence.

usage: license_test.py FILE...  (FILE: one in the root of the sources)

Walks the folder of the sources itself and not Bazel's copies, so that no list can leave one out.
"""

import fnmatch
import os
import sys
import tempfile
import unittest

LINE = "SPDX-License-Identifier: Apache-2.0"
SLASHES = (".h", ".cc")
HASHES = (".bzl", ".cmake", ".py", ".sh")
ROOT = "."


def ignored(root):
    """The folders that .gitignore names: those of a slash in the root, others anywhere."""
    with open(os.path.join(root, ".gitignore"), encoding="utf-8") as file:
        patterns = [line.strip().rstrip("/") for line in file] + ["/.git"]
    return lambda path: any(fnmatch.fnmatch("/" + path, pattern if pattern[0] == "/"
                                            else "*/" + pattern) for pattern in patterns)


def first_lines(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return [file.readline().rstrip("\n"), file.readline().rstrip("\n")]


def expected_line(path):
    """The line that a file has to have; None if it is no source."""
    name = os.path.basename(path)
    if name.endswith(SLASHES):
        return "// " + LINE
    is_script = "." not in name and first_lines(path)[0].startswith("#!")
    return "# " + LINE if name.endswith(HASHES) or name == "CMakeLists.txt" or is_script else None


def sources(root):
    """Pairs of a path and the line that the file has to have."""
    skipped = ignored(root)
    for folder, names, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        names[:] = [name for name in names if not skipped(os.path.normpath(
            os.path.join(inside, name)))]
        for name in files:
            path = os.path.join(folder, name)
            line = expected_line(path)
            if line is not None:
                yield path, line


def without_line(root):
    found = []
    for path, line in sources(root):
        first, second = first_lines(path)
        if (second if first.startswith("#!") else first) != line:
            found.append(os.path.relpath(path, root))
    return sorted(found)


class LicenseTest(unittest.TestCase):
    maxDiff = None

    def test_the_tree_is_there(self):
        found = {os.path.relpath(path, ROOT) for path, _ in sources(ROOT)}
        for path in ("smp/smp.h", "layers.bzl", "tools/test", ".ci/run", "tests/mpi_test.sh"):
            self.assertIn(path, found)

    def test_every_source_has_the_line(self):
        self.assertEqual(without_line(ROOT), [])

    def test_the_licence_is_there(self):
        with open(os.path.join(ROOT, "LICENSE"), encoding="utf-8") as file:
            text = file.read()
        self.assertIn("Apache License\n", text)
        self.assertIn("Copyright 2026 The smp authors", text)


class PlantedTest(unittest.TestCase):
    """A file without the line is found, whatever its kind."""

    def test_planted(self):
        with tempfile.TemporaryDirectory() as root:
            def plant(path, text):
                path = os.path.join(root, path)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)

            plant(".gitignore", "/out-*\n__pycache__/\n")
            plant("a/good.cc", "// " + LINE + "\nint a;\n")
            plant("a/good.sh", "#!/bin/sh\n# " + LINE + "\n")
            plant("a/text.md", "text\n")
            plant("a/data", "data\n")
            plant("out-1/made.cc", "int a;\n")
            plant("a/__pycache__/b.py", "")
            self.assertEqual(without_line(root), [])
            plant("a/late.h", "#pragma once\n// " + LINE + "\n")
            plant("a/empty.py", "")
            plant("a/script", "#!/bin/sh\necho\n")
            plant("a/CMakeLists.txt", "project(a)\n")
            plant("a/other.cc", "// SPDX-License-Identifier: MIT\n")
            self.assertEqual(without_line(root), [
                "a/CMakeLists.txt", "a/empty.py", "a/late.h", "a/other.cc", "a/script"])


if __name__ == "__main__":
    ROOT = os.path.dirname(os.path.realpath(sys.argv[1]))
    unittest.main(argv=sys.argv[:1])
