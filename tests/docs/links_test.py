#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Links of the documents lead somewhere, the site has all pages, and the README's commands are run.

usage: links_test.py FILE...  (FILE: one in the root of the sources)

Looks at the folder of the sources itself, since links lead to anything in it.
"""

import os
import re
import sys
import tempfile
import unittest

FENCE = re.compile(r"^(```+)[^\n]*\n.*?^\1[ ]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
LAMBDA = re.compile(r"\[[^\]\n]*\]\(\s*[\w:]+[ &*][^)\n]*\)")
HEADING = re.compile(r"^#+ +(.*?)\s*$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
NAV_ENTRY = re.compile(r"^ +- (?:[^:\n]+: )?([\w/]+\.md)$", re.MULTILINE)
COMMANDS = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Words that users search for.
TASKS = ["bf16", "clip", "contrastive", "dataloader", "docker", "does it help on one machine",
         "early stopping", "ema", "evaluation", "fine-tuning", "frozen", "gans",
         "gradient accumulation", "learning rate", "mixed precision", "out of memory", "plot",
         "preemption", "restart", "resume", "several models", "slurm", "tensor parallelism", "tokens",
         "validation", "warm-up", "weight tying", "wheel"]
WRITTEN_BY_HOOKS = {"index.md"}  # tools/docs_hooks.py makes it of README.md
ROOT = "."


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as file:
        return file.read()


def pages(root):
    found = [name for name in os.listdir(root) if name.endswith(".md")]
    for folder, _, names in os.walk(os.path.join(root, "docs")):
        found += [os.path.relpath(os.path.join(folder, name), root)
                  for name in names if name.endswith(".md")]
    return sorted(found)


def anchors(text):
    """The anchors of a page's headings, on the site as on code hosts."""
    found, seen = set(), {}
    for heading in HEADING.findall(FENCE.sub("", text)):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(slug if slug not in seen else "%s-%d" % (slug, seen[slug]))
        seen[slug] = seen.get(slug, 0) + 1
    return found


def broken_links(root):
    problems = []
    for page in pages(root):
        for link in LINK.findall(CODE.sub("", FENCE.sub("", read(root, page)))):
            if re.match(r"\w+:", link):
                continue
            target, _, anchor = link.partition("#")
            path = os.path.normpath(os.path.join(os.path.dirname(page), target)) if target else page
            if not os.path.exists(os.path.join(root, path)):
                problems.append("%s links to %s, which is not there" % (page, link))
            elif anchor and anchor not in anchors(read(root, path)):
                problems.append("%s links to %s, where no heading has that name" % (page, link))
    return problems


def code_in_text(root):
    """Functions outside of code, which a site shows as links: the reader misses their arguments."""
    return ["%s has %s outside of code" % (page, code) for page in pages(root)
            for code in LAMBDA.findall(CODE.sub("", FENCE.sub("", read(root, page))))]


def navigation_problems(root):
    listed = NAV_ENTRY.findall(read(root, "mkdocs.yml").split("\nnav:\n")[1])
    there = {os.path.relpath(page, "docs") for page in pages(root) if page.startswith("docs/")}
    problems = ["mkdocs.yml lists %s twice" % page
                for page in sorted(set(listed)) if listed.count(page) > 1]
    problems += ["mkdocs.yml lists %s, which is not there" % page
                 for page in listed if page not in there | WRITTEN_BY_HOOKS]
    problems += ["mkdocs.yml does not list docs/%s" % page for page in sorted(there - set(listed))]
    return problems


def headers_without_page(root):
    """Public headers that tools/api_reference.py does not know."""
    known = set(re.findall(r'"([\w/]+\.h)"', read(root, "tools/api_reference.py")))
    there = {os.path.relpath(os.path.join(folder, name), os.path.join(root, "smp"))
             for folder, _, names in os.walk(os.path.join(root, "smp"))
             for name in names if name.endswith(".h") and not folder.endswith(("detail", "smp/c"))}
    return sorted(there - known - {"nn/transformer_parts.h"})


def tasks_without_heading(root):
    """Tasks that no heading of the pages names, by which the site's search finds them first."""
    headings = [heading.lower() for page in pages(root)
                for heading in HEADING.findall(FENCE.sub("", read(root, page)))]
    return [task for task in TASKS if not any(task in heading for heading in headings)]


def commands_not_run(root):
    """Commands of the README that continuous integration does not call."""
    run = {line.strip().replace("- run: ", "")
           for line in read(root, ".github/workflows/ci.yml").splitlines()}
    return [line for block in COMMANDS.findall(read(root, "README.md"))
            for line in block.splitlines() if line not in run]


class LinksTest(unittest.TestCase):
    maxDiff = None

    def test_the_pages_are_there(self):
        self.assertIn("README.md", pages(ROOT))
        self.assertIn("docs/errors/capture.md", pages(ROOT))
        self.assertGreater(sum(len(LINK.findall(read(ROOT, page))) for page in pages(ROOT)), 200)

    def test_links_lead_somewhere(self):
        self.assertEqual(broken_links(ROOT), [])

    def test_code_is_no_link(self):
        self.assertEqual(code_in_text(ROOT), [])

    def test_the_site_has_all_pages(self):
        self.assertEqual(navigation_problems(ROOT), [])

    def test_headings_name_tasks(self):
        self.assertEqual(tasks_without_heading(ROOT), [])

    def test_the_reference_has_all_headers(self):
        self.assertEqual(headers_without_page(ROOT), [])

    def test_the_commands_of_the_readme_are_run(self):
        self.assertTrue(COMMANDS.search(read(ROOT, "README.md")))
        self.assertEqual(commands_not_run(ROOT), [])


class PlantedTest(unittest.TestCase):
    """Broken links are found."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name
        os.makedirs(os.path.join(self.root, "docs"))
        os.makedirs(os.path.join(self.root, ".github/workflows"))

    def plant(self, path, text):
        with open(os.path.join(self.root, path), "w", encoding="utf-8") as file:
            file.write(text)

    def test_links(self):
        self.plant("README.md", "[a](docs/a.md#one-two)\n[b](docs/b.md)\n```\n[c](none.md)\n```\n")
        self.plant("docs/a.md", "# One `two`\n[up](#one)\n[x](x:y)\n```\n# three\n```\n[3](#three)")
        self.assertEqual(broken_links(self.root), [
            "README.md links to docs/b.md, which is not there",
            "docs/a.md links to #one, where no heading has that name",
            "docs/a.md links to #three, where no heading has that name"])

    def test_tasks(self):
        self.plant("README.md", "".join("# %s\n" % task for task in TASKS[1:]) + TASKS[0])
        self.assertEqual(tasks_without_heading(self.root), TASKS[:1])

    def test_code(self):
        self.plant("README.md", "`[&](int x)` [=](const Net& net) { [a](b.md) }\n")
        self.assertEqual(code_in_text(self.root),
                         ["README.md has [=](const Net& net) outside of code"])

    def test_navigation(self):
        self.plant("docs/a.md", "")
        self.plant("docs/b.md", "")
        self.plant("mkdocs.yml", "x: y\nnav:\n  - index.md\n  - A: a.md\n  - a.md\n  - C: c.md\n")
        self.assertEqual(navigation_problems(self.root), [
            "mkdocs.yml lists a.md twice", "mkdocs.yml lists c.md, which is not there",
            "mkdocs.yml does not list docs/b.md"])

    def test_headers(self):
        for folder in ("tools", "smp/detail"):
            os.makedirs(os.path.join(self.root, folder))
        self.plant("tools/api_reference.py", 'PAGES = ["a.h"]')
        for header in ("a.h", "b.h", "detail/c.h"):
            self.plant("smp/" + header, "")
        self.assertEqual(headers_without_page(self.root), ["b.h"])

    def test_commands(self):
        self.plant("README.md", "```sh\ntools/a\ntools/b --c\n```\n```\ntools/d\n```\n")
        self.plant(".github/workflows/ci.yml", "      - run: tools/a\n      tools/b\n")
        self.assertEqual(commands_not_run(self.root), ["tools/b --c"])


if __name__ == "__main__":
    ROOT = os.path.dirname(os.path.realpath(sys.argv[1]))
    unittest.main(argv=sys.argv[:1])
