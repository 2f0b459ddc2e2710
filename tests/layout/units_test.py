#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""units_test.py FILE (one in the root): no name of an anonymous namespace hides that of a header
from another source of the target (bazel/unity.bzl), which would take the wrong one in silence."""

import functools
import os
import pathlib
import re
import sys
import unittest.mock

from license_test import sources

NOISE = re.compile(r'"(?:[^"\\\n]|\\.)*"|(?<!^}  )//[^\n]*', re.MULTILINE)
LIST = re.compile(r"^    (srcs|alone) = \[(.*?)\]", re.DOTALL | re.MULTILINE)
LINE = re.compile(r"^(?:(namespace) ?([\w:]*) ?\{|(\}  // namespace)"
                  r"|(?:struct|class|enum class|enum) (\w+)[ {:][^;\n]*\{"
                  r"|(?:inline |static )*const(?:expr)? [^(\n]*?(\w+)(?:\[\w*\])*(?= =|[{;])([^;]*)"
                  r"|(?!using|TEST|TORCH_)[A-Za-z][\w:<>,*& ]*[ *&](\w+)\()", re.MULTILINE)


@functools.lru_cache(None)
def text_of(path):
    return pathlib.Path(path).read_text(encoding="utf-8") if os.path.exists(path) else ""


@functools.lru_cache(None)
def names_of(path, anonymous):
    """Pairs of a name that the file declares at the margin, and the namespace around it."""
    around, found = [], set()
    for opened, space, closed, *names in LINE.findall(NOISE.sub(" ", text_of(path))):
        if opened or closed:
            around = around + [space] if opened else around[:-1]
        elif anonymous == ("" in around):
            names[2:3] = re.findall(r",\s+(\w+) = ", names[2])  # further names of a constant's line
            found |= {(name, "::".join(filter(None, around))) for name in filter(None, names)}
    return found


@functools.lru_cache(None)
def seen_by(path):
    """Those that headers declare and that the file writes without a namespace."""
    found, waiting = {path}, [path]
    while waiting:
        names = re.findall(r'^#include "([^"]+)"', text_of(waiting.pop()), re.MULTILINE)
        waiting += set(names) - found
        found.update(waiting)
    words = set(re.findall(r"(?<![\w.>:])\w+", NOISE.sub(" ", text_of(path))))
    return {pair for each in found - {path} for pair in names_of(each, False) if pair[0] in words}


def hidden(paths):
    """The names that one of the paths hides from another."""
    return {(path, name) for path in paths for name, space in names_of(path, True)
            for other in paths - {path} for seen, outer in seen_by(other)
            if seen == name and (space + "::").startswith(outer and outer + "::")}


class UnitsTest(unittest.TestCase):
    def test_no_source_hides_a_name(self):
        for folder in {os.path.normpath(os.path.dirname(path)) for path, _ in sources(".")}:
            for rule in text_of(folder + "/BUILD.bazel").split("\n)\n"):
                lists = {name: {os.path.join(folder, source) for source in re.findall(
                    r'"([^":]+\.cc)"', value)} for name, value in LIST.findall(rule)}
                self.assertFalse(hidden(lists.get("srcs", set()) - lists.get("alone", set())))

    @unittest.mock.patch.object(sys.modules[__name__], "text_of", {
        "h.h": "namespace n {\nint f();\nint g();\nconstexpr int kA = 1, kB = 2;\n",
        "a.cc": "namespace n::m {\nnamespace {\nint f() { return 0; }\nconst int kB = 3;\n",
        "b.cc": '#include "h.h"\nnamespace n::m {\nint h() { return f() + n::g() + kB; }\n'}.get)
    def test_planted(self):
        self.assertEqual(hidden({"a.cc", "b.cc"}), {("a.cc", "f"), ("a.cc", "kB")})


if __name__ == "__main__":
    os.chdir(os.path.dirname(os.path.realpath(sys.argv[1])))
    unittest.main(argv=sys.argv[:1])
