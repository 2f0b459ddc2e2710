#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sources of C++ are formatted as .clang-format says.

usage: format_test.py FILE...  (FILE: one in the root of the sources)

Formats differ between versions of clang-format. That of Debian 12, which tools/setup.sh installs,
is the one that counts; without it the test fails.
"""

import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
import unittest

from license_test import SLASHES, sources

VERSION = "14."
ROOT = "."


def formatter():
    """The command, if there is one of the version that counts."""
    for name in ("clang-format-14", "clang-format"):
        try:
            said = subprocess.run([name, "--version"], stdout=subprocess.PIPE, text=True, check=True)
        except FileNotFoundError:
            continue
        if re.search(r"version (\S+)", said.stdout)[1].startswith(VERSION):
            return name
    raise FileNotFoundError("no clang-format %sx: install the Debian package clang-format, or "
                            "clang-format-14" % VERSION)


def unformatted(root):
    """The files that clang-format would change."""
    paths = sorted(os.path.relpath(path, root) for path, _ in sources(root)
                   if path.endswith(SLASHES))
    command = [formatter(), "--dry-run", "--style=file"]

    def said_of(some):
        return subprocess.run(command + some, cwd=root, stderr=subprocess.PIPE, text=True,
                              check=True).stderr

    parts = [paths[i::64] for i in range(64)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        said = "".join(pool.map(said_of, filter(None, parts)))
    return sorted(set(re.findall(r"^(\S+?):\d+:\d+: warning: code should be clang-formatted", said,
                                 re.MULTILINE)))


class FormatTest(unittest.TestCase):
    maxDiff = None

    def test_every_source_is_formatted(self):
        self.assertEqual(unformatted(ROOT), [], "run clang-format -i on these")

    def test_planted(self):
        with tempfile.TemporaryDirectory() as root:
            for name, text in {".gitignore": "/out\n", ".clang-format": "BasedOnStyle: Google\n",
                               "good.cc": "int a;\n", "bad.cc": "int  a;\n", "bad.h": "int a ;\n",
                               "bad.py": "a  = 1\n"}.items():
                with open(os.path.join(root, name), "w", encoding="utf-8") as file:
                    file.write(text)
            self.assertEqual(unformatted(root), ["bad.cc", "bad.h"])


if __name__ == "__main__":
    ROOT = os.path.dirname(os.path.realpath(sys.argv[1]))
    unittest.main(argv=sys.argv[:1])
