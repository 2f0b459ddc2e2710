# SPDX-License-Identifier: Apache-2.0
"""Writes docs/exported_zoo.md of the rows that zoo.py has."""

import re

INTRODUCTION = """# The zoo of exported programs

Models of {packages}, tiny and with random weights, in training mode: [torch.export](exported.md) writes each, `smp::load_exported` reads it, and it trains three steps of three microbatches on 1, 2 and 4 ranks, with SGD and with `smp::optim::FusedAdamW`.

- **Operators**, **random**: calls of the program, and those that draw random numbers.
- **Batch**: whether its size is dynamic in the program.
- **Ranks**: losses, gradients, weights and buffers against Python's `ep.module()` with the same torch, one thread and the same microbatches, where [an interpreter](smp_streams.py) gives each random operator the number of the [streams of a step](capture.md#random-numbers), and AdamW has `fused=True`. *Equal* is: every bit, of both optimizers and all three numbers of ranks.
- **Back**: C++ writes the loaded program again by `smp::export_program`, `torch.export.load` reads that, and both programs are called in Python, with batches of 2, 3 and 6: outputs, gradients and buffers.
- **Eager**: the same for the model itself in Python, without an export, or the first kernel in which it differs from its program. An export drops the backward of a `torch.autograd.Function`, such as Bloom's GELU, and differentiates its forward instead.

Experts of `transformers` that call its own operator are refused: choose others by `experts_implementation="batched_mm"`, as Qwen2Moe here does.

Made by `tools/exported_zoo`.
"""

HEAD = ("| Model | Operators | Random | Parameters | Batch | Ranks | Back | Eager |\n"
        "|---|--:|--:|--:|---|---|---|---|\n")


def cell(text):
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def reason_of(text):
    """Leaves out where this run was: its ranks, folders, and microbatches."""
    text = re.sub(r"\[smp[^\]]*\] ", "", text)
    return re.sub(r'(zoo_run: )?(exported program|cannot export) "[^"]*": ', "", text)


def ranks_cell(row):
    verdicts = row["verdicts"].values()
    kinds = {verdict for verdict, _ in verdicts}
    if kinds == {"equal"}:
        return "equal"
    reasons = sorted({f"{verdict}: {reason_of(reason)}" for verdict, reason in verdicts
                      if verdict != "equal"})
    return cell(reasons[0])


def outcome(row):
    """One of: equal, refused, failed, not exported."""
    if "not_exported" in row:
        return "not exported"
    if "error" in row:
        return "failed"
    kinds = {verdict for verdict, _ in row["verdicts"].values()}
    if kinds == {"equal"}:
        return "equal"
    return "refused" if kinds <= {"equal", "refused"} else "failed"


def line(row):
    if "error" in row:
        return f"| {row['name']} | | | | | failed: {cell(row['error'])} | | |\n"
    back, eager = [cell(reason_of(row.get(way, "not tried") or "equal"))
                   for way in ("back", "eager")]
    batch = "dynamic" if row["dynamic"] else "fixed"
    return (f"| {row['name']} | {row['operators']} | {row['random']} | {row['parameters']} | {batch} | "
            f"{ranks_cell(row)} | {back} | {eager} |\n")


def page_of(rows, versions):
    """The page's text; `rows` in the order of the models, `versions` by package."""
    named = [f"{name} {version}" for name, version in versions.items()]
    text = INTRODUCTION.format(packages=", ".join(named[:-1]) + " and " + named[-1])
    outcomes = [outcome(row) for row in rows]
    counts = [f"{outcomes.count(kind)} {kind}"
              for kind in ("equal", "refused", "failed", "not exported")]
    text += f"\n{len(rows)} models: {', '.join(counts)}.\n"
    for package in versions:
        chosen = [row for row, kind in zip(rows, outcomes)
                  if row["package"] == package and kind != "not exported"]
        if chosen:
            text += f"\n## {package}\n\n{HEAD}" + "".join(line(row) for row in chosen)
    refused = [row for row, kind in zip(rows, outcomes) if kind == "not exported"]
    if refused:
        text += "\n## Not exported by torch in training mode\n\n"
        text += "".join(f"- {row['name']}: {cell(row['not_exported'])}\n" for row in refused)
    return text
