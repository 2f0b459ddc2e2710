#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the programs of the C interface's tests and examples, tests/c/*.pt2.

usage: make_model.py FOLDER  (a Python with torch 2.11)

train.pt2 and eval.pt2: a small network that predicts two numbers of three, whose batch is a dynamic
size, in both modes. named.pt2: a model with an input by name that returns its loss among others.
"""

import pathlib
import sys

import torch
from torch import nn


BATCH = {0: torch.export.Dim("batch", min=1, max=4096)}


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, *, scale):
        y = self.layer(x) * scale
        return {"loss": (y * y).mean(), "number": 3, "both": (y, [x])}


def write(path, *arguments, **options):
    program = torch.export.export(*arguments, **options)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    torch.export.save(program, path)


def main(folder):
    torch.manual_seed(1)
    folder = pathlib.Path(folder)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(),
                          nn.Linear(16, 2))
    x = torch.zeros(4, 3)
    for mode in ("train", "eval"):
        model.train(mode == "train")
        write(folder / (mode + ".pt2"), model, (x,), None, dynamic_shapes=(BATCH,))
    write(folder / "named.pt2", Named(), (x,), {"scale": torch.zeros(4, 1)},
          dynamic_shapes={"x": BATCH, "scale": BATCH})


if __name__ == "__main__":
    main(sys.argv[1])
