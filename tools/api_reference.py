# SPDX-License-Identifier: Apache-2.0
"""Writes the API reference: pages of Markdown from the docstrings (`///`) of the public headers.

The headers are parsed as text by tree-sitter, so nothing that they include is needed. Neighbours
without a blank line or a docstring between them (overloads, `rank()` and `size()`) are shown
together.
"""

import os
import re
import textwrap
from dataclasses import dataclass, field

import tree_sitter
import tree_sitter_cpp

FOLDER = "reference"
INDEX = FOLDER + "/index.md"
NAMED = 3  # number of declarations shown together whose names are in the heading
# The pages: title, then headers of smp/. Every public header is on one of them.
PAGES = {
    "Start and end": ["init.h", "mpi.h", "preemption.h", "exit_status.h", "memory.h", "version.h",
                      "keyed_random.h"],
    "Configuration": ["config.h"],
    "Ranks and groups": ["group.h", "comm_group.h", "reduce_op.h", "work.h"],
    "Objects between ranks": ["objects.h"],
    "DistributedModel": ["distributed_model.h", "model_core.h", "model_options.h",
                         "removable_handle.h"],
    "The step": ["step.h", "step_options.h", "whole.h", "fields.h", "step_output.h",
                 "token_loss.h"],
    "Leaf modules": ["leaf.h"],
    "Models written in Python": ["exported.h", "export_program.h"],
    "DistributedOptimizer": ["distributed_optimizer.h", "optimizer_core.h", "optimizer_state.h",
                             "loss_scale_options.h", "clip_grad.h", "scheduler.h", "ema.h"],
    "Optimizers": ["optim/adadelta.h", "optim/fused.h", "optim/lamb.h", "optim/novograd.h",
                   "optim/own_options.h", "optim/traits.h", "optim/uses_grad_norm.h",
                   "optim/uses_tensor_norms.h"],
    "Half precision": ["amp.h", "autocast.h"],
    "Partition": ["partition_scope.h"],
    "Model creation": ["model_creation.h"],
    "Activation memory": ["activation_checkpointing.h"],
    "Checkpoints": ["save_load.h", "checkpoint_options.h", "checkpoint_parts.h", "pretrained.h",
                    "pretrained_options.h", "name_map.h"],
    "Data parallelism": ["ddp.h", "ddp_options.h", "comm_hooks.h", "join.h"],
    "smddp": ["smddp.h", "c10d.h"],
    "Tensor parallelism": ["tensor_parallelism.h", "tensor_parallelism_options.h",
                           "tp_module.h", "tp_register.h", "nn/layout.h",
                           "nn/parameter_split.h", "nn/split_module.h"],
    "Divided layers": ["nn/parallel_linear.h", "nn/parallel_embedding.h", "nn/cross_entropy.h",
                       "nn/operators.h"],
    "Transformers": ["nn/transformer_options.h", "nn/attention_layer.h", "nn/flash_attention.h",
                     "nn/transformer_layer.h",
                     "nn/transformer_lm_head.h"],
    "Errors": ["error.h"],
}
# Lists of includes.
WITHOUT_PAGE = {"smp.h", "nn.h", "optim.h", "export.h"}
# For C, with docs/c.md as its page.
WITHOUT_PAGE |= {"c.h"}
# Not for users, as their BUILD file and their namespaces say.
INTERNAL = re.compile(r"detail/|^c/|nn/transformer_parts\.h")
INTERNAL_NAMESPACES = {"detail", "comm", "core", "graph", "runtime", "rewrite"}

TYPES = {"class_specifier": "class", "struct_specifier": "struct", "enum_specifier": "enum"}
TORCH_ARG = re.compile(r"TORCH_ARG\(((?:[^()]|\([^()]*\))*), (\w+)\)")
MACRO = re.compile(r"^#define (\w+) *\\\n((?:.*\\\n)*.*)\n", re.MULTILINE)
FOR_THE_LIBRARY = re.compile(r"\AFor the library itself|its type is internal")
EXPORTED = re.compile(r"\bSMP_API ([^;{]*)")
IGNORED = re.compile(r"\bTORCH_MODULE\(\w+\);|^#(?:define|undef) .*$", re.MULTILINE)


@dataclass
class Entry:
    """A declaration, or several that are shown together."""

    code: list
    doc: str
    names: list = field(default_factory=list)
    type_name: str = ""
    members: list = field(default_factory=list)


def anchor(*names):
    return re.sub(r"[^a-z0-9_-]", "", "-".join(names).lower())


def page_path(title):
    return "%s/%s.md" % (FOLDER, re.sub(r"\W+", "_", title.lower()))


def expand(source):
    """The header as if its macros were written out."""
    macros = {name: body.replace("\\\n", "\n") for name, body in MACRO.findall(source)}
    source = MACRO.sub("", source)
    for name, body in macros.items():
        source = re.sub(r"\b%s;" % name, lambda _: body.strip() + ";", source)
    # Lines behind a mark of export are aligned with it.
    source = EXPORTED.sub(
        lambda match: re.sub(r"\n {%d}(?= )" % len("SMP_API "), "\n", match.group(1)), source)
    return IGNORED.sub("", TORCH_ARG.sub(r"\1 \2", source))


class Header:
    """The declarations of a header."""

    def __init__(self, source):
        self.source = expand(source).encode()
        self.lines = self.source.decode().split("\n")
        parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language()))
        self.entries = []
        self.read_scope(parser.parse(self.source).root_node)

    def text(self, begin, end):
        return self.source[begin:end].decode()

    def read_scope(self, scope):
        """The declarations of a namespace and of those within it that are for users."""
        self.entries += self.read_list(scope.children, public=True)
        for node in scope.children:
            if node.type == "namespace_definition":
                name = node.child_by_field_name("name")
                parts = set(name.text.decode().split("::")) if name else {"detail"}
                if not parts & (INTERNAL_NAMESPACES | {"torch", "c10d"}):
                    self.read_scope(node.child_by_field_name("body"))

    def read_list(self, nodes, public):
        entries, comment, last_row, trailing = [], [], -2, ""
        for node in nodes:
            row = node.start_point.row
            if node.type == "access_specifier":
                public = node.text.decode() == "public"
            elif node.type == "comment":
                line = node.text.decode()
                if line.startswith("///<"):
                    if public and entries and row == last_row:
                        self.add_trailing(entries, line)
                elif line.startswith("///"):
                    comment = comment + [line] if comment and row == last_row + 1 else [line]
                    last_row = row
                else:
                    comment = []
                continue
            elif public and node.is_named:
                entry = self.read(node, "\n".join(line[3:] for line in comment))
                if entry is not None and not FOR_THE_LIBRARY.search(entry.doc):
                    joined = not entry.doc and not entry.type_name and row == last_row + 1
                    if joined and entries and not entries[-1].type_name:
                        entries[-1].code += entry.code
                        entries[-1].names += [name for name in entry.names
                                              if name not in entries[-1].names]
                    else:
                        entries.append(entry)
            comment = []
            last_row = node.end_point.row
        return entries

    @staticmethod
    def add_trailing(entries, line):
        text = line[4:].strip()
        entries[-1].code[-1] += "  // " + text

    def read(self, node, doc):
        """The declaration of a node; None if it is nothing that users see."""
        doc = textwrap.dedent(doc)
        if node.type == "namespace_definition" and doc:
            return Entry([], doc, ["namespace " + node.child_by_field_name("name").text.decode()])
        inner = node
        while inner.type == "template_declaration":
            inner = inner.named_children[-1]
        if inner.type == "alias_declaration":
            name = inner.child_by_field_name("name").text.decode()
            return Entry([self.code_of(node, node.end_byte)], doc, [name])
        specifier = inner if inner.type in TYPES else inner.child_by_field_name("type")
        if specifier is not None and specifier.type in TYPES and \
                specifier.child_by_field_name("body") is not None and \
                inner.child_by_field_name("declarator") is None:
            return self.read_type(node, specifier, doc)
        if inner.type in TYPES or inner.type not in (
                "declaration", "field_declaration", "function_definition"):
            return None
        text = inner.text.decode()
        if re.search(r"= (delete|default);", text) or "~" in text.split("(")[0] or \
                text.startswith(("friend", "static_assert")):
            return None
        return Entry([self.code_of(node, self.end_of_declaration(inner))], doc,
                     [self.name_of(inner)])

    @staticmethod
    def name_of(node):
        """The name that a declaration declares."""
        operator = re.search(r"\boperator *(?:\(\)|[^(]+)", node.text.decode())
        if operator:
            return operator.group()
        while node.type != "identifier" and node.child_by_field_name("declarator") is not None or \
                node.type == "reference_declarator":
            node = node.child_by_field_name("declarator") or node.named_children[-1]
        return node.text.decode()

    def read_type(self, node, specifier, doc):
        body = specifier.child_by_field_name("body")
        name = specifier.child_by_field_name("name").text.decode()
        code = self.code_of(node, body.start_byte).rstrip(";")
        entry = Entry([code], doc, type_name=name)
        if specifier.type == "enum_specifier":
            entry.code = [self.code_of(node, body.end_byte)]
        else:
            entry.members = self.read_list(body.children,
                                           public=specifier.type == "struct_specifier")
        return entry

    def end_of_declaration(self, node):
        """Without the body of a function, and without the initialisation of members."""
        for child in node.children:
            if child.type in ("compound_statement", "field_initializer_list", "try_statement"):
                return child.start_byte
        return node.end_byte

    def code_of(self, node, end):
        text = " " * node.start_point.column + self.text(node.start_byte, end)
        text = re.sub(r" *// NOLINT.*", "", text).replace("///<", "//")
        return textwrap.dedent(text).strip().rstrip(";").rstrip() + ";"


def prose_of(text, names, here):
    """Text of a docstring without blocks of code."""
    def link(match):
        name = match.group(1)
        if name not in names or name == here:
            return match.group()
        return "[`%s`](%s)" % (name, names[name])

    parts = re.split(r"(`[^`]*`)", text)
    return "".join(re.sub(r"`(?:smp::)?(\w+)`", link, part) if part.startswith("`") else
                   re.sub(r"\bdocs/([\w/]+\.md)", r"[\1](../\1)", part.replace("<", "&lt;"))
                   for part in parts)


def markdown_of(doc, names, here):
    """A docstring as Markdown, with links to pages and to types."""
    doc = re.sub(r"\\code\n(.*?)\\endcode", r"\n\1\n", doc, flags=re.DOTALL)
    doc = re.sub(r"^((?!- ).*)\n- ", r"\1\n\n- ", doc, flags=re.MULTILINE)
    # Paragraphs that are indented are code.
    result = []
    for paragraph in re.split(r"\n\s*\n", doc.strip("\n")):
        is_code = all(line.startswith("  ") for line in paragraph.split("\n"))
        result.append("```cpp\n%s\n```" % textwrap.dedent(paragraph) if is_code
                      else prose_of(paragraph, names, here))
    return "\n\n".join(result)


def heading(level, title, name):
    return ["%s %s {: #%s }" % ("#" * level, title, name), ""]


def render(entries, names, level, here=""):
    lines, last = [], None
    for entry in entries:
        if entry.type_name:
            lines += heading(level, entry.type_name, anchor(entry.type_name))
        elif entry.names != last:
            title = ", ".join(entry.names[:NAMED] + ["..."] * (len(entry.names) > NAMED))
            lines += heading(level, title, anchor(here or "smp", entry.names[0]))
        last = entry.names
        lines += ["```cpp", *entry.code, "```", ""] if entry.code else []
        lines += [markdown_of(entry.doc, names, entry.type_name or here), ""] if entry.doc else []
        lines += render(entry.members, names, level + 1, entry.type_name)
    return lines


def public_headers(root):
    found = set()
    for folder, _, files in os.walk(os.path.join(root, "smp")):
        found |= {os.path.relpath(os.path.join(folder, name), os.path.join(root, "smp"))
                  for name in files if name.endswith(".h")}
    return {name for name in found if not INTERNAL.search(name)} - WITHOUT_PAGE


def names_of(entries, page):
    """Where the types of a page are described, by name; a module by that of its holder, too."""
    found = {}
    for entry in entries:
        if entry.type_name:
            place = "%s#%s" % (os.path.relpath(page, FOLDER), anchor(entry.type_name))
            found[entry.type_name] = found[re.sub("Impl$", "", entry.type_name)] = place
    return found


def pages(root):
    """The text of each page by its path."""
    listed = [name for names in PAGES.values() for name in names]
    if sorted(listed) != sorted(public_headers(root)):
        raise ValueError("tools/api_reference.py: PAGES and the public headers differ in %s" %
                         sorted(set(listed) ^ public_headers(root)))
    headers, names = {}, {}
    for title, files in PAGES.items():
        for name in files:
            with open(os.path.join(root, "smp", name), encoding="utf-8") as file:
                headers[name] = Header(file.read()).entries
            names.update(names_of(headers[name], page_path(title)))
    result = {}
    for title, files in PAGES.items():
        lines = ["# " + title, ""]
        for name in files:
            lines += ["## smp/%s" % name, ""] + render(headers[name], names, level=3)
        result[page_path(title)] = "\n".join(lines)
    result[INDEX] = index_of(headers)
    return result


def index_of(headers):
    """The page that lists the others, with the types and functions of each."""
    lines = ["# Reference", "", "Every public declaration, by header. `#include \"smp/smp.h\"` has "
             "those of the core, `smp/optim.h` the optimizers, `smp/nn.h` the divided layers.", "",
             "| page | headers | declares |", "|---|---|---|"]
    for title, files in PAGES.items():
        names = sorted({name for file in files for entry in headers[file]
                        for name in entry.names or [entry.type_name] if name})
        lines.append("| [%s](%s) | %s | %s |" % (
            title, os.path.relpath(page_path(title), FOLDER),
            " ".join("`smp/%s`" % file for file in files),
            ", ".join("`%s`" % name for name in names)))
    return "\n".join(lines) + "\n"


def navigation():
    return [{"All headers": INDEX}] + [{title: page_path(title)} for title in PAGES]
