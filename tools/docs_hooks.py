# SPDX-License-Identifier: Apache-2.0
"""Hooks that mkdocs calls while it builds the site: pages made of other files of the
repository.

The front page is README.md; the reference is written from the public headers (api_reference.py);
each folder of examples is a page.
"""

import importlib.util
import os
import re

from mkdocs.structure.files import File

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```+)[^\n]*\n.*?^\1[ ]*$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r"^# +(.+?) *$", re.MULTILINE)
FILE_NAME = re.compile(r"[\w/.]+\.md")
EXAMPLE = re.compile(r"(?:\.\./)*examples/(\w+)(?:/([\w.]+))?")
LANGUAGES = {".cc": "cpp", ".h": "cpp", ".json": "json", ".txt": "cmake"}


def load_reference():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "api_reference.py")
    spec = importlib.util.spec_from_file_location("api_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outside_of_code(change, markdown):
    """`markdown` with `change` applied outside of blocks of code."""
    result, end = "", 0
    for fence in FENCE.finditer(markdown):
        result += change(markdown[end:fence.start()]) + fence.group()
        end = fence.end()
    return result + change(markdown[end:])


def example_pages(root):
    """A page for each folder of examples, with its files."""
    pages = {}
    for folder in sorted(os.listdir(os.path.join(root, "examples"))):
        inside = os.path.join(root, "examples", folder)
        if not os.path.isdir(inside):
            continue
        text = "# Example: %s\n" % folder
        for name in sorted(os.listdir(inside)):
            language = LANGUAGES.get(os.path.splitext(name)[1])
            if language:
                with open(os.path.join(inside, name), encoding="utf-8") as file:
                    text += "\n## %s\n\n```%s\n%s```\n" % (name, language, file.read())
        if "\n## " in text:
            pages["examples/%s.md" % folder] = text
    return pages


def example_of(link, here, files):
    """The link to the page that shows a file or folder of the examples, or nothing."""
    match = EXAMPLE.fullmatch(link.rstrip("/"))
    page = files.get_file_from_path("examples/%s.md" % match.group(1)) if match else None
    if page is None:
        return None
    name = match.group(2) or ""
    anchor = "#" + re.sub(r"[^\w-]", "", name.lower()) if "\n## %s\n" % name in (
        page.content_string) else ""
    return os.path.relpath(page.src_uri, here or ".") + anchor


def version_of(root):
    """The version in smp/version.h, such as 1.2.3."""
    with open(os.path.join(root, "smp/version.h"), encoding="utf-8") as file:
        return ".".join(re.findall(r"^#define SMP_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", file.read(),
                                   re.MULTILINE))


def on_config(config):
    root = os.path.dirname(config.config_file_path)
    config.site_name += " " + version_of(root)
    config.nav.append({"Examples": [{os.path.basename(path)[:-3]: path}
                                    for path in example_pages(root)]})
    config.nav.append({"Reference": load_reference().navigation()})
    return config


def on_files(files, config):
    root = os.path.dirname(config.config_file_path)
    with open(os.path.join(root, "README.md"), encoding="utf-8") as file:
        readme = file.read()
    front = outside_of_code(lambda text: text.replace("](docs/", "]("), readme)
    files.append(File.generated(config, "index.md", content=front))
    for path, text in {**load_reference().pages(root), **example_pages(root)}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to pages are called by their titles, not by the names of files; those to examples lead to
    their pages, and those to other files of the repository to the code host, if there is one."""
    here = os.path.dirname(page.file.src_uri)

    def target_of(match):
        image, text, link = match.groups()
        if re.match(r"\w+:|#", link):
            return match.group()
        file, sharp, anchor = link.partition("#")
        path = os.path.normpath(os.path.join(here, file))
        if path == os.path.join("..", "README.md"):  # the front page
            return "%s[%s](%s%s%s)" % (image, text, os.path.relpath("index.md", here or "."), sharp, anchor)
        target = files.get_file_from_path(path)
        if target is not None:
            title = TITLE.search(target.content_string) if FILE_NAME.fullmatch(text) else None
            return "%s[%s](%s)" % (image, title.group(1) if title else text, link)
        example = example_of(path, here, files)
        if example:
            return "[%s](%s)" % (text, example)
        if config.repo_url and not image:
            inside = os.path.relpath(os.path.join(config.docs_dir, path),
                                     os.path.dirname(config.config_file_path))
            return "[%s](%s/blob/main/%s)" % (text, config.repo_url.rstrip("/"), inside)
        return text

    return outside_of_code(lambda text: LINK.sub(target_of, text), markdown)
