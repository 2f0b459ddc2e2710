#!/usr/bin/env python3
"""Every error of the library has an entry in docs/errors, and every entry an error.

usage: error_pages_test.py PAGE... SOURCE...  (pages end with .md)

An entry is a heading with one or more quoted lines below it, the texts of its errors:

    ## Data read on the host
    > operator ... reads the data of a tensor on the host

"..." stands for what differs from case to case. In the sources, an error's text is what the string
literals of a SMP_CHECK_WITH(..), fail<..>(..), refuse(..) or SMP_CHECK(..) say, joined by "...".
A quoted line names an error if its parts between the dots occur in the error's text in order.
"""

import re
import sys

RAISES = re.compile(
    r"SMP_CHECK_WITH\(\s*[\w:]*\w*Error\s*,|\bfail<[\w:]*\w*Error>\(|\brefuse\(|\bthrow \w*Error\("
    r"|\btake_data\(")
LITERAL = re.compile(r'R"\((.*?)\)"|"((?:[^"\\]|\\.)*)"', re.DOTALL)


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


def error_text(call):
    """The literals of a call; neighbours are one, others are joined by dots."""
    text, end = "", 0
    for literal in LITERAL.finditer(call):
        if call[end:literal.start()].strip():
            text += "..."
        text += literal.group(1) or literal.group(2) or ""
        end = literal.end()
    return text.replace('\\"', '"').replace("\\n", " ").replace("\\\\", "\\")


def errors_in(path):
    text = re.sub(r"//[^\n]*", "", open(path, encoding="utf-8").read())
    for match in RAISES.finditer(text):
        found = error_text(call_at(text, match.start()))
        # Without words of its own it passes on another text.
        if re.search(r"[A-Za-z]{3}", found):
            yield found


def entries_in(path):
    heading = None
    for line in open(path, encoding="utf-8"):
        if line.startswith("#"):
            heading = line.strip("# \n")
        elif line.startswith("> "):
            yield heading, line[2:].strip()


def names(quoted, text):
    position = 0
    for part in quoted.split("..."):
        found = text.find(part.strip(), position)
        if found < 0:
            return False
        position = found + len(part.strip())
    return True


def main(paths):
    pages = [path for path in paths if path.endswith(".md")]
    sources = [path for path in paths if not path.endswith(".md")]
    entries = [(page, heading, quoted) for page in pages for heading, quoted in entries_in(page)]
    errors = [(source, text) for source in sources for text in errors_in(source)]
    problems = []
    for source, text in errors:
        if not any(names(quoted, text) for _, _, quoted in entries):
            problems.append(f"{source}: no page has an entry for: {text}")
    for page, heading, quoted in entries:
        if not any(names(quoted, text) for _, text in errors):
            problems.append(f"{page}: \"{heading}\" quotes what no source says: {quoted}")
    for problem in problems:
        print("FAIL:", problem)
    print(f"{len(errors)} errors, {len(entries)} entries, {len(problems)} problems")
    return 0 if errors and entries and not problems else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
