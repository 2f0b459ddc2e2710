#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the archives in tests/exported/archives.

usage: make_fixtures.py FOLDER [NAME...]  (a Python with torch 2.11; all without a NAME)

Each NAME.pt2 is a program of one of the models below. torch_2_9.pt2 and the like are "zoo" as that
version of torch writes it: run with it, this program writes that alone. torch.export.load of 2.11
refuses those of 2.10. The version stands in the archive ("torch_version" in models/model.json).

Results are not stored: kernels differ by CPU. Tests have results.py compute them.
"""

import pathlib
import sys

import torch
from torch import nn
from torch.export import Dim

BATCH = Dim("batch", min=2, max=64)


class Zoo(nn.Module):
    """Exports for training have these whole: layers with state, random operators, tied weights."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm1d(8)
        self.att = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x):
        h = self.emb(x)
        h = self.bn(self.conv(h.transpose(1, 2))).transpose(1, 2)
        h = h + self.att(h, h, h)[0]
        h = h + nn.functional.scaled_dot_product_attention(h, h, h, dropout_p=self.drop.p
                                                           if self.training else 0.0)
        h, _ = self.lstm(self.drop(h))
        if self.training:
            with torch.no_grad():
                self.seen.add_(h.mean())
        return self.head(h * self.scale)


class Modes(nn.Module):
    """Regions with other modes, and constants."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 4)
        self.c = torch.tensor([0.5, 1.0, 1.5, 2.0])

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x).relu()
        h = torch.utils.checkpoint.checkpoint(lambda z: nn.functional.dropout(z.float(), 0.25),
                                              h, use_reentrant=False)
        with torch.no_grad():
            bias = self.b.weight.mean(1)
        return self.b(h) * self.c + bias + torch.tensor([1.0, 2.0, 3.0, 4.0])


class Shapes(nn.Module):
    """Structures of arguments and results, sizes that follow from others, a written buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x, pair, named, count, none=None, *, mask):
        y = self.layer(x) + pair[0] * pair[1] + named["k"]
        y = y.view(x.shape[0] // 2, 2, 4).flatten(0, 1) * mask * count
        self.average = self.average * 0.9 + y.mean(0).detach() * 0.1
        left, right = y.split(2, 1)
        return {"out": [y, (left, right.sum())], "rows": x.shape[0], "none": none}


class Numbers(nn.Module):
    """Integers that may differ from call to call: one is a size too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, rows, factor, scale):
        torch._check(factor <= 9)
        return self.layer(x).view(rows, 2, 2).flatten(1) * factor * scale


class Writes(nn.Module):
    """Inputs that the model writes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, states):
        x.mul_(0.5)
        y = self.layer(x) + states["sum"]
        states["sum"] += y.detach().mean(0)
        states["count"] += 1
        return y


class Casts(nn.Module):
    """Regions of autocast that use one weight several times, and with another mode within."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        h = x
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                h = self.cell(h).tanh()
            with torch.no_grad():
                other = self.head(h)
            with torch.autocast("cpu", enabled=False):
                h = self.cell(h.float())
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            h = self.head(self.head(h)) + other
        return self.cell(h.float())


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                                 nn.Linear(2 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Gpt(nn.Module):
    """For smp_train: no part depends on the mode."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(24, 8)
        self.positions = nn.Parameter(torch.randn(6, 8))
        self.blocks = nn.Sequential(Block(8, 2), Block(8, 2))
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.positions))


class Losses(nn.Module):
    """For smp_train: a model that is given targets, and returns its loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, target):
        out = self.layer(x).tanh()
        return {"out": out, "loss": nn.functional.mse_loss(out, target)}


class Small(nn.Module):
    """For archives that are damaged."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x).relu()


def export(path, model, make_inputs, dynamic=None, core=False):
    args, kwargs = make_inputs(0)
    program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic)
    if core:
        program = program.run_decompositions()
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else []:
            node.meta.pop("stack_trace", None)  # paths of this machine
    torch.export.save(program, path)


def tokens(step):
    return (torch.randint(0, 20, (4 + 2 * step, 6)),), {}


def rows(step):
    return (torch.randn(4, 4),), {}


def numbered(step):
    return (torch.randn(4 + 2 * step, 4), 4 + 2 * step, 3 + 2 * step, 2.5), {}


def written(step):
    return (torch.randn(4 + 2 * step, 4),
            {"sum": torch.randn(4), "count": torch.tensor([step])}), {}


def targeted(step):
    return (torch.randn(4, 3), torch.randn(4, 2)), {}


def shaped(step):
    n = 6 + 2 * step
    x = [torch.randn(n, 4) for _ in range(5)]
    return (x[0], (x[1], x[2]), {"k": x[3]}, 3), {"mask": x[4]}


HALF = Dim("half", min=2, max=100)
EVEN = {0: 2 * HALF}
SHAPES = {"x": EVEN, "pair": (EVEN, EVEN), "named": {"k": EVEN}, "count": None, "mask": EVEN}

# The programs by name: seed, model, inputs of a step, sizes that differ, and whether it is
# decomposed.
PROGRAMS = {
    "zoo": (1, Zoo, tokens, ({0: BATCH},)),
    "zoo_eval": (1, lambda: Zoo().eval(), tokens, ({0: BATCH},)),
    "modes": (2, Modes, rows),
    "shapes": (3, Shapes, shaped, SHAPES),
    "shapes_core": (3, Shapes, shaped, SHAPES, True),
    "small": (4, Small, lambda step: ((torch.randn(4, 3),), {}), ({0: BATCH},)),
    "numbers": (5, Numbers, numbered, ({0: Dim.DYNAMIC}, Dim.DYNAMIC, Dim.DYNAMIC, None)),
    "writes": (6, Writes, written, ({0: BATCH}, {"sum": None, "count": None})),
    "writes_core": (6, Writes, written, ({0: BATCH}, {"sum": None, "count": None}), True),
    "casts": (7, Casts, rows, ({0: BATCH},)),
    "gpt": (8, Gpt, tokens, ({0: BATCH},)),
    "losses": (9, Losses, targeted, ({0: BATCH}, {0: BATCH})),
}
LINKED = "2.11"  # the torch that tests link


def main(folder, names):
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    version = ".".join(torch.__version__.split(".")[:2])
    if version != LINKED:
        torch.manual_seed(1)
        export(folder / f"torch_{version.replace('.', '_')}.pt2", Zoo(), tokens, ({0: BATCH},))
        return
    for name in names or PROGRAMS:
        seed, make, inputs, *options = PROGRAMS[name]
        torch.manual_seed(seed)
        export(folder / f"{name}.pt2", make(), inputs, *options)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
