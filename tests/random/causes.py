#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts causes of wrong numbers back, one at a time, and counts the random programs until each shows.

usage: tests/random/causes.py [--programs N] [--first SEED] [NAME...]
       causes.py --check  (in the root: whether all causes can still be put back)

For each cause (those named, or all) it changes one place of the sources, builds //tests/random, runs
found_test, whose programs random ones once were, and random programs until one fails, and puts the
place back. It prints a row of a table for each. A cause whose place has changed is an error: mend its row below.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGETS = ["//tests/random:found_test", "//tests/random:random_test"]

# Name, the repeated fault, file, the place as it is, the place with the cause.
CAUSES = [
    ("overlap", "a write through an overlapping view may lie on the other side of a cut",
     "partitioner/cuts.cc",
     "return graph::overlaps_itself(meta.sizes, meta.strides) ? 2 : 1;",
     "return graph::overlaps_itself(meta.sizes, meta.strides) ? 1 : 1;"),
    ("leaf", "a view that is older than its history passes for a leaf",
     "graph/replay.cc",
     "!tensor.is_leaf() || tensor.is_view()) {",
     "!tensor.is_leaf()) {"),
    ("requiring", "what crosses a cut after its memory got a history requires no gradient",
     "pipeline/edges.cc",
     "if (requires_grad.since(transfer.value) < first[transfer.to]) {",
     "if (graph.values[transfer.value].meta.requires_grad) {"),
    ("modes", "an operator runs under the modes that happen to be in force",
     "graph/replay.cc",
     "if (!instruction.op.mode.runs_like(ExecutionMode::current())) "
     "mode.emplace(instruction.op.mode);",
     "if (instruction.op.mode.inference) mode.emplace(instruction.op.mode);"),
    ("casts", "autocast casts a parameter once for all scopes of a stage",
     "graph/replay.cc",
     "if (autocast_scope < 0 || !tensor.requires_grad()",
     "if (autocast_scope >= 0 || !tensor.requires_grad()"),
    ("lists", "what an operator writes and does not return is no result",
     "graph/written_results.cc",
     "return !is_leaf(op) &&",
     "return false && !is_leaf(op) &&"),
    ("late", "what is written after backward is written in place",
     "graph/late_writes.cc",
     "if (!needed) continue;",
     "if (!needed || now > 0) continue;"),
    ("roots", "backward begins with what its roots hold at the end",
     "graph/tracer.cc",
     "if (!roots_.empty()) keep_roots(current);",
     "if (roots_.size() > 1000) keep_roots(current);"),
    ("zero", "a probability may be patched from and to 0",
     "graph/guard.cc",
     "return op.random_ordinal >= 0 && is_zero(a) != is_zero(b);",
     "return false && op.random_ordinal >= 0 && is_zero(a) != is_zero(b);"),
    ("filled", "a factory's result that host code fills later is taken for the recorded one",
     "graph/host_data.cc",
     "if (memories_.empty()) return std::nullopt;",
     "return std::nullopt;"),
    ("prefix", "a run that leaves a known graph forgets which values are views",
     "graph/capture.cc",
     "  restore_views();\n}",
     "}"),
    ("complex", "parts of a complex tensor are written on the memory of a message",
     "pipeline/message.cc",
     "const bool on_message = !c10::isComplexType(meta.dtype);",
     "const bool on_message = true || !c10::isComplexType(meta.dtype);"),
    ("spread", "the function's other views do not show a history that a write gave their memory",
     "graph/tracer.cc",
     "if (!histories_.take_begun()) return;",
     "if (histories_.take_begun() || true) return;"),
    ("variable", "nobody holds the end of a variable's history that autocast casts",
     "graph/replay.cc",
     "alias.end = torch::autograd::impl::grad_accumulator(tensor);",
     "alias.end = core::NodePtr(torch::autograd::impl::grad_accumulator(tensor.variable_data()));"),
    ("detached", "gradients go back through detach_",
     "partitioner/gradient_flow.cc",
     "graph::OperatorTrait::kCutsHistory)) return;",
     "graph::OperatorTrait::kCutsHistory) && operator_index < 0) return;"),
    ("transposed", "a view and what makes another one of it under no_grad may be on two stages",
     "partitioner/cuts.cc",
     "  add_views_in_place(graph, result);",
     "  if (result.size() > 1000) add_views_in_place(graph, result);"),
    ("shift", "what crosses a cut begins at a multiple of 64 bytes",
     "pipeline/message.cc",
     "const int64_t shift = *words++ = graph::shift_of(tensor);",
     "const int64_t shift = *words++ = 0 * graph::shift_of(tensor);"),
    ("unlinked", "a view made under no_grad that crosses a cut has a place in the history",
     "pipeline/stage_state.cc",
     "if (!entry.linked) {",
     "if (!entry.linked && state.microbatch < 0) {"),
    ("views", "a view that is written beyond a cut is none there",
     "pipeline/stage_state.cc",
     "if (entry.written_view) ",
     "if (entry.written_view && state.microbatch < 0) "),
    ("names", "what autograd::grad differentiates with respect to was another tensor before a write",
     "graph/differentiate.cc",
     "const std::vector<ValueId> names = with_earlier_names(graph, input);",
     "const std::vector<ValueId> names(1, with_earlier_names(graph, input)[0]);"),
    ("slopes", "a cut may divide what autograd::grad differentiates",
     "graph/differentiate.cc",
     "ranges.push_back({first_in_range(graph, graph.operators[last]), static_cast<int>(last)});",
     "ranges.push_back({static_cast<int>(last), static_cast<int>(last)});"),
    ("part", "libtorch is asked for a part of the gradients of a list that wrote several views",
     "graph/split_backward.cc",
     "if (leads_to_input(node) && !may_run_in_part(*node)) return false;",
     "if (false && leads_to_input(node) && !may_run_in_part(*node)) return false;"),
]


def source(path, right):
    """The text of a source, which has a place once."""
    text = path.read_text(encoding="utf-8")
    if text.count(right) != 1:
        sys.exit(f"{path}: expected once, got {text.count(right)} times: {right}\n"
                 "Mend the cause's row in tests/random/causes.py.")
    return text


class Planted:
    """The sources with a cause in them, while it is open."""

    def __init__(self, file, right, wrong):
        self.path, self.right, self.wrong = ROOT / file, right, wrong

    def __enter__(self):
        self.text = source(self.path, self.right)
        self.path.write_text(self.text.replace(self.right, self.wrong), encoding="utf-8")

    def __exit__(self, *_):
        self.path.write_text(self.text, encoding="utf-8")


def run(test, test_filter, **settings):
    """The output of a test and how it ended."""
    result = subprocess.run(
        [ROOT / "bazel-bin/tests/random" / test, f"--gtest_filter={test_filter}"], cwd=ROOT,
        env={**os.environ, **{key: str(value) for key, value in settings.items()}},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    if result.returncode < 0:
        return result.stdout, f"the test ended with signal {-result.returncode}"
    return result.stdout, ""


def found_by():
    """How many tests of found_test fail, and the first of them."""
    output, end = run("found_test", "*", SMP_LOG_LEVEL="error")
    failed = re.findall(r"^\[  FAILED  \] (\S+) \(", output, re.MULTILINE)
    return end or (f"{failed[0]}{f' and {len(failed) - 1} more' if failed[1:] else ''}"
                   if failed else "none")


def programs_until_found(first, programs):
    """The number of programs until one failed and how it did, or none and why."""
    output, end = run("random_test", "RandomPrograms.*", SMP_RANDOM_FIRST=first,
                      SMP_RANDOM_PROGRAMS=programs, SMP_RANDOM_FAILURES=1, SMP_LOG_LEVEL="error")
    failed = re.search(r"^seed (\d+): (.*)$", output, re.MULTILINE)
    if failed:
        return int(failed[1]) - first + 1, failed[2]
    return f"none of {programs}", end


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=20000, help="at most, for each cause")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--check", action="store_true", help="look at the sources only")
    parser.add_argument("names", nargs="*", help="of causes; all without")
    options = parser.parse_args()
    unknown = set(options.names) - {cause[0] for cause in CAUSES}
    if unknown:
        parser.error(f"no cause is named {', '.join(sorted(unknown))}")
    if options.check:
        for _, _, file, right, _ in CAUSES:
            source(pathlib.Path(file), right)
        return
    print("| cause put back | test that fails | random programs until found | by |\n|---|---|---|---|",
          flush=True)
    for name, text, file, right, wrong in CAUSES:
        if options.names and name not in options.names:
            continue
        with Planted(file, right, wrong):
            subprocess.run(["bazel", "build", *TARGETS], cwd=ROOT, check=True,
                           stderr=subprocess.DEVNULL)
            test = found_by()
            number, how = programs_until_found(options.first, options.programs)
        print(f"| {name}: {text} | {test} | {number} | {how[:100]} |", flush=True)


if __name__ == "__main__":
    main()
