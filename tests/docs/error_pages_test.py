#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every error has an entry in docs/errors and a test of its text, and every entry an error.

usage: error_pages_test.py PAGE... SOURCE... TEST...  (pages end with .md, tests lie in tests/)

An entry is a heading with a quoted list below it, the texts of its errors:

    ## Data read on the host
    > - operator ... reads the data of a tensor on the host

"..." stands for what differs from case to case. In the sources, an error's text is what the string
literals of a SMP_CHECK_WITH(..), SMP_CHECK(..), core::write_file(..), fail<..>(..) or refuse(..), or
of a message = c10::str(..), say, joined by "...".
A quoted line names an error if its parts between the dots occur in the error's text in order.
A test names an error if one of its string literals has four or more words in a row of the error
that no other error has. Where two errors say the same, any four words in a row do.
"""

import collections
import re
import sys

RAISES = re.compile(
    r"\bSMP_CHECK_WITH\(\s*[\w:]*\w*Error\s*,|\bSMP_CHECK\(|\bfail<[\w:]*\w*Error>\("
    r"|\bcore::write_file\(|\brefuse_?\(|\bthrow \w*Error\(|\btake_data\(|\bmessage = c10::str\(")
LITERAL = re.compile(r'R"\((.*?)\)"|"((?:[^"\\]|\\.)*)"', re.DOTALL)
GAP = "..."
ENTRY = "> - "
WORD = re.compile(r"\w+")
WORDS_IN_A_ROW = 4


def call_at(text, start):
    """The arguments of the call whose opening parenthesis is the first from `start`."""
    begin = text.index("(", start)
    depth, i = 0, begin
    while True:
        if text[i] == '"':
            i = LITERAL.match(text, i).end()
            continue
        if text[i] == "'" and text[i + 2] == "'":
            i += 3
            continue
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i + 1]
        i += 1


def joined_literals(code):
    """The literals of a piece of code; neighbours are one, others are joined by dots."""
    text, end = "", 0
    for literal in LITERAL.finditer(code):
        if code[end:literal.start()].strip():
            text += GAP
        text += literal.group(1) or literal.group(2) or ""
        end = literal.end()
    return text.replace('\\"', '"').replace("\\n", " ").replace("\\\\", "\\")


def code_of(path):
    """A source without its comments."""
    return re.sub(r"(?<!:)//[^\n]*", "", open(path, encoding="utf-8").read())


def errors_in(path):
    text = code_of(path)
    for match in RAISES.finditer(text):
        found = joined_literals(call_at(text, match.start()))
        # Without words of its own it passes on another text.
        if re.search(r"[A-Za-z]{3}", found):
            yield found


def entries_in(path):
    heading = None
    for line in open(path, encoding="utf-8"):
        if line.startswith("#"):
            heading = line.strip("# \n")
        elif line.startswith(ENTRY):
            yield heading, line[len(ENTRY):].strip()


def quotes_in_no_list(path):
    """Quoted lines that would run together on the site."""
    return [line.strip() for line in open(path, encoding="utf-8")
            if line.startswith(">") and not line.startswith(ENTRY)]


def names(quoted, text):
    position = 0
    for part in quoted.split(GAP):
        found = text.find(part.strip(), position)
        if found < 0:
            return False
        position = found + len(part.strip())
    return True


def rows(text):
    """All rows of four or more words without a gap; of fewer where no part has as many."""
    parts = [WORD.findall(part) for part in text.split(GAP)]
    least = min(WORDS_IN_A_ROW, max(len(part) for part in parts))
    return {" ".join(part[i:j]) for part in parts for i in range(len(part))
            for j in range(i + least, len(part) + 1)}


class Tests:
    """The string literals of tests."""

    def __init__(self, paths):
        parts = [part for path in paths for part in joined_literals(code_of(path)).split(GAP)]
        self.lines = "".join(f"\n {' '.join(WORD.findall(part))} " for part in parts)

    def say(self, row):
        return f" {row} " in self.lines


def untested(errors, tests):
    """The errors that no test names."""
    owners = collections.Counter(row for text in {text for _, text in errors} for row in rows(text))
    for source, text in errors:
        own = [row for row in rows(text) if owners[row] == 1] or rows(text)
        if not any(tests.say(row) for row in own):
            yield source, text


def main(paths):
    pages = [path for path in paths if path.endswith(".md")]
    tests = [path for path in paths if path.startswith("tests/")]
    sources = [path for path in paths if path not in pages + tests]
    entries = [(page, heading, quoted) for page in pages for heading, quoted in entries_in(page)]
    errors = [(source, text) for source in sources for text in errors_in(source)]
    problems = [f"{page}: write \"{ENTRY}...\" for each text: {line}"
                for page in pages for line in quotes_in_no_list(page)]
    for source, text in errors:
        if not any(names(quoted, text) for _, _, quoted in entries):
            problems.append(f"{source}: no page has an entry for: {text}")
    for page, heading, quoted in entries:
        if not any(names(quoted, text) for _, text in errors):
            problems.append(f"{page}: \"{heading}\" quotes what no source says: {quoted}")
    for source, text in untested(errors, Tests(tests)):
        problems.append(f"{source}: no test has words of: {text}")
    for problem in problems:
        print("FAIL:", problem)
    print(f"{len(errors)} errors, {len(entries)} entries, {len(tests)} tests, "
          f"{len(problems)} problems")
    return 0 if errors and entries and tests and not problems else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
