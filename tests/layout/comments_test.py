#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Comments begin with the thing or a verb, and things are not called persons.

usage: comments_test.py FILE            (FILE: one in the root of the sources)
       comments_test.py FILE --count    prints the findings and their numbers, and tests nothing

Looks at sources and BUILD files, and at documents: there at persons, relative "what", and comments
in blocks of code. What a program cannot hold (one relative clause a sentence, the true thing) is
for readers.
"""

import collections
import os
import re
import sys
import tempfile
import unittest

from license_test import SLASHES, expected_line, ignored

ROOT = "."
WITH_SLASHES = SLASHES + (".c",)
OTHERS = (".bazel", ".c", ".md")  # held beside the sources of license_test
# A comment does not begin so, nor any of its sentences with the last four.
HEADLESS = re.compile(r"(what|of|as|by|with|who|to|whose)\b", re.IGNORECASE)
SENTENCE = re.compile(r"[.!] (What|Who|Whose|Of)\b")
ANYWHERE = {
    "person": re.compile(r"\b(whoever|whomever|nobody|somebody|everybody|anybody|"
                         r"(any|some|every)one who)\b", re.IGNORECASE),
    "relative": re.compile(r"\b(of|by|with|from|besides?|but|than|into|for|is|are) what\b"),
}
# The same of a verb's object or a clause's subject; documents may ask questions.
OBJECT = re.compile(r"\b(throws?|reads?|writes?|gives?|takes?|keeps?|makes?|frees|holds?|adds?|"
                    r"returns?|computes?|does|do|gets?|has|have) what\b|[;:] what\b",
                    re.IGNORECASE)
# Quoted text of C++, which may hold slashes; one that spans lines is raw.
QUOTED = re.compile(r'R"(\w*)\((?:.|\n)*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*')
SLASH = re.compile(r"(?P<code>.*?)(?P<mark>///?<?)(?P<text>.*)")
HASH = re.compile(r"(?P<code>(?:.*\s)?)(?P<mark>#)(?P<text>(?:\s.*)?)")
DOCSTRING = re.compile(r'(?P<code>\s*)(?P<mark>""")(?P<text>.*)')


def without_quoted(text):
    """C++ with quoted text crossed out."""
    return QUOTED.sub(lambda match: match[0] if match[0].startswith("//")
                      else re.sub(r"[^\n]", "_", match[0]), text)


def comments(path, text):
    """Triples of a line's number, whether a comment begins there, and its text."""
    slashes = path.endswith(WITH_SLASHES)
    column = None  # that of the comment on the line before
    for number, line in enumerate((without_quoted(text) if slashes else text).split("\n"), 1):
        match = (SLASH if slashes else HASH).fullmatch(line)
        if not match and path.endswith((".py", ".bzl")):
            match = DOCSTRING.fullmatch(line)
        if not match or "SPDX-License" in line or line.startswith("#!"):
            column = None
            continue
        begins = bool(match["code"].strip()) or column != match.start("mark")
        column = match.start("mark")
        yield number, begins, match["text"].strip()


def comments_in_document(text):
    """The same of the lines in a document's blocks of code."""
    in_code = False
    for number, line in enumerate(text.split("\n"), 1):
        in_code ^= line.lstrip().startswith("```")
        match = re.fullmatch(r".*\s(?://|#) (.*)", line)
        if in_code and match:
            yield number, True, match[1]


def findings(path, text):
    """Triples of the rule, the line's number and its text."""
    in_document = path.endswith(".md")
    lines = []
    for number, begins, line in comments_in_document(text) if in_document else comments(path, text):
        lines.append((number, line))
        if begins and HEADLESS.match(line) or SENTENCE.search(line):
            yield "headless", number, line
        if not in_document and OBJECT.search(line):
            yield "relative", number, line
    if in_document:  # Texts of errors, which are quoted, stand as they are.
        lines = [pair for pair in enumerate(text.split("\n"), 1) if not pair[1].startswith("> ")]
    for number, line in lines:
        for rule, pattern in ANYWHERE.items():
            if pattern.search(line):
                yield rule, number, line


def held(root):
    """Pairs of a path and its text, of all that the rules hold over."""
    skipped = ignored(root)
    for folder, names, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        names[:] = [name for name in names
                    if not skipped(os.path.normpath(os.path.join(inside, name)))]
        for name in files:
            path = os.path.join(folder, name)
            if name.endswith(OTHERS) or expected_line(path):
                with open(path, encoding="utf-8", errors="replace") as file:
                    yield os.path.normpath(os.path.join(inside, name)), file.read()


def all_findings(root):
    """Pairs of the rule and a line that says where."""
    return [(rule, "%s:%d: %s: %s" % (path, number, rule, line))
            for path, text in sorted(held(root)) for rule, number, line in findings(path, text)]


class CommentsTest(unittest.TestCase):
    maxDiff = None

    def test_the_tree_is_there(self):
        found = {path for path, _ in held(ROOT)}
        for path in ("smp/smp.h", "layers.bzl", "tools/test", "README.md", "comm/BUILD.bazel"):
            self.assertIn(path, found)

    def test_comments_begin_with_the_thing(self):
        found = all_findings(ROOT)
        self.assertEqual(len(found), 0, "\n" + "\n".join(line for _, line in found))


class PlantedTest(unittest.TestCase):
    """A comment against the rules is found wherever it stands, and no other."""

    def expect(self, name, text, rules):
        with tempfile.TemporaryDirectory() as root:
            for path, content in ((".gitignore", "/out/\n"), (name, text), ("out/a.cc", text)):
                os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                    file.write(content)
            self.assertEqual([rule for rule, _ in all_findings(root)], rules, text)

    def test_comments_of_cpp(self):
        self.expect("a.h", "/// What it does.\nint a;  ///< of a rank\n", ["headless"] * 2)
        self.expect("a.h", "/// The work. Who asks\n/// waits, as what is\n", ["headless"])
        self.expect("a.cc", "int a;  // the sum\n        // of all ranks\n", [])
        self.expect("a.cc", 'f("// What"); g(\'"\'); h(R"(\n// Of\n)");  // a rank\'s\n', [])
        self.expect("a.cc", "// A thread waits for nobody.\n", ["person"])
        self.expect("a.cc", "// A copy of what a rank has.\n", ["relative"])
        self.expect("a.cc", "// Throws what it throws; says what failed.\n", ["relative"])
        self.expect("a.c", "// The rank's tensors.\nint a;  // by rank\n", ["headless"])

    def test_other_comments(self):
        self.expect("a.py", '# SPDX-License-Identifier: MIT\n"""As in C++."""\n', ["headless"])
        self.expect("a.sh", "#!/bin/sh\n# By hand.\necho ${a#of}  \x23 to log\n", ["headless"] * 2)
        self.expect("BUILD.bazel", "# Somebody links it.\n", ["person"])
        self.expect("CMakeLists.txt", "# With tests.\n", ["headless"])

    def test_documents(self):
        self.expect("a.md", "# What it is\nOf ranks.\n> is what was asked\n", [])
        self.expect("a.md", "```\nrun  \x23 as root\n```\nNobody does.\n", ["headless", "person"])


if __name__ == "__main__":
    ROOT = os.path.dirname(os.path.realpath(sys.argv[1]))
    if "--count" in sys.argv:
        found = all_findings(ROOT)
        print("\n".join(line for _, line in found))
        print(dict(collections.Counter(rule for rule, _ in found)))
        sys.exit()
    unittest.main(argv=sys.argv[:1])
