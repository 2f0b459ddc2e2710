# SPDX-License-Identifier: Apache-2.0
"""What mkdocs asks while it builds the site: pages that are made of other files of the repository.

The front page is README.md; the reference is written from the public headers (api_reference.py).
"""

import importlib.util
import os
import re

from mkdocs.structure.files import File

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```+)[^\n]*\n.*?^\1[ ]*$", re.MULTILINE | re.DOTALL)


def load_reference():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "api_reference.py")
    spec = importlib.util.spec_from_file_location("api_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outside_of_code(change, markdown):
    """`markdown` with `change` applied to what is not in blocks of code."""
    result, end = "", 0
    for fence in FENCE.finditer(markdown):
        result += change(markdown[end:fence.start()]) + fence.group()
        end = fence.end()
    return result + change(markdown[end:])


def on_config(config):
    config.nav.append({"Reference": load_reference().navigation()})
    return config


def on_files(files, config):
    root = os.path.dirname(config.config_file_path)
    with open(os.path.join(root, "README.md"), encoding="utf-8") as file:
        readme = file.read()
    front = outside_of_code(lambda text: text.replace("](docs/", "]("), readme)
    files.append(File.generated(config, "index.md", content=front))
    for path, text in load_reference().pages(root).items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to files of the repository that are no pages lead to the code host, if there is one."""
    here = os.path.dirname(page.file.src_uri)

    def target_of(match):
        image, text, link = match.groups()
        path = os.path.normpath(os.path.join(here, link.partition("#")[0]))
        if re.match(r"\w+:|#", link) or files.get_file_from_path(path) is not None:
            return match.group()
        if config.repo_url and not image:
            inside = os.path.relpath(os.path.join(config.docs_dir, path),
                                     os.path.dirname(config.config_file_path))
            return "[%s](%s/blob/main/%s)" % (text, config.repo_url.rstrip("/"), inside)
        return text

    return outside_of_code(lambda text: LINK.sub(target_of, text), markdown)
