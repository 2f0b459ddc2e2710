#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mistakes do not compile, and the compiler tells the remedy, once for each.

usage: mistakes_test.py SOURCE LIBTORCH_VERSION_CMAKE

A line of SOURCE with "// expected: TEXT" has to give one error that has the text, and nothing else
may give one.
"""
import os
import re
import subprocess
import sys
import unittest

SOURCE, CMAKE = sys.argv[1:]
LIBTORCH = os.path.realpath(CMAKE).split("/share/cmake/")[0]
EXPECTED = re.compile(r"// expected: (.*)")


def errors():
    """The errors of clang for the source: an error and the notes to it, each as one text."""
    includes = [os.path.join(LIBTORCH, folder)
                for folder in ("include", "include/torch/csrc/api/include")]
    command = ["clang++", "-std=c++17", "-fsyntax-only", "-ferror-limit=0", "-I."]
    for folder in includes:
        command += ["-isystem", folder]
    said = subprocess.run(command + [SOURCE], capture_output=True, text=True).stderr
    return re.split(r"^(?=[^\n]*: (?:fatal )?error: )", said, flags=re.MULTILINE)[1:]


class MistakesTest(unittest.TestCase):
    def test_each_mistake_gives_one_error_with_its_text(self):
        with open(SOURCE, encoding="utf-8") as file:
            expected = {number: found.group(1) for number, line in enumerate(file, 1)
                        if (found := EXPECTED.search(line))}
        self.assertGreater(len(expected), 5)
        name = os.path.basename(SOURCE)
        left = errors()
        for number, text in expected.items():
            place = "%s:%d:" % (name, number)
            found = [error for error in left if place in error]
            self.assertEqual(len(found), 1, (place, found or left))
            self.assertIn(text, found[0])
            left.remove(found[0])
        self.assertEqual(left, [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
