#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the archives in tests/exported/archives, and what Python computes with them.

usage: make_fixtures.py FOLDER  (a Python with torch 2.11)

Each NAME.pt2 is a program of one of the models below, and NAME.safetensors what Python's
`ep.module()` computes: of three steps the inputs, the loss and all gradients, with a step of SGD
(0.1) after each, and all parameters and buffers at the end. One thread, and
torch.manual_seed(100 + step) before the forward pass of each step. Of evaluations there are inputs
and losses only.
"""

import json
import pathlib
import struct
import sys

import torch
from torch import nn
from torch.export import Dim

STEPS = 3
BATCH = Dim("batch", min=2, max=64)


class Zoo(nn.Module):
    """What training exports have whole: layers with state, random operators, tied weights."""

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


class Small(nn.Module):
    """For archives that are damaged."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x).relu()


def loss_of(result):
    if isinstance(result, dict):
        result = result["out"][0]
    return (result * result).mean()


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (list, tuple)) else []


def write_safetensors(path, tensors):
    types = {torch.float32: "F32", torch.int64: "I64"}
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.detach().contiguous().clone().untyped_storage())
        header[name] = {"dtype": types[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def expected(program, make_inputs, train):
    """What a training, or an evaluation, by Python's module of the program gives."""
    module = program.module()
    parameters = dict(module.named_parameters())
    tensors = {}
    for step in range(STEPS):
        torch.manual_seed(50 + step)
        args, kwargs = make_inputs(step)
        for i, tensor in enumerate(tensors_in([args, kwargs])):
            tensors[f"{step}.input.{i}"] = tensor.clone()
        torch.manual_seed(100 + step)
        module.zero_grad()
        loss = loss_of(module(*args, **kwargs))
        tensors[f"{step}.loss"] = loss.clone()
        if not train:
            continue
        loss.backward()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                tensors[f"{step}.gradient.{name}"] = parameter.grad.clone()
                with torch.no_grad():
                    parameter.add_(parameter.grad, alpha=-0.1)
    for name, tensor in [*parameters.items(), *module.named_buffers()] if train else []:
        tensors[f"value.{name}"] = tensor.detach().clone()
    return tensors


def write(folder, name, model, make_inputs, dynamic=None, core=False):
    args, kwargs = make_inputs(0)
    program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic)
    if core:
        program = program.run_decompositions()
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else []:
            node.meta.pop("stack_trace", None)  # paths of this machine
    torch.export.save(program, folder / f"{name}.pt2")
    write_safetensors(folder / f"{name}.safetensors",
                      expected(program, make_inputs, model.training))


def tokens(step):
    return (torch.randint(0, 20, (4 + 2 * step, 6)),), {}


def rows(step):
    return (torch.randn(4, 4),), {}


def shaped(step):
    n = 6 + 2 * step
    x = [torch.randn(n, 4) for _ in range(5)]
    return (x[0], (x[1], x[2]), {"k": x[3]}, 3), {"mask": x[4]}


def main(folder):
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    half = Dim("half", min=2, max=100)
    even = {0: 2 * half}
    torch.manual_seed(1)
    write(folder, "zoo", Zoo(), tokens, ({0: BATCH},))
    torch.manual_seed(1)
    write(folder, "zoo_eval", Zoo().eval(), tokens, ({0: BATCH},))
    torch.manual_seed(2)
    write(folder, "modes", Modes(), rows)
    torch.manual_seed(3)
    write(folder, "shapes", Shapes(), shaped,
          {"x": even, "pair": (even, even), "named": {"k": even}, "count": None, "mask": even})
    torch.manual_seed(3)
    write(folder, "shapes_core", Shapes(), shaped, {"x": even, "pair": (even, even),
                                                    "named": {"k": even}, "count": None,
                                                    "mask": even}, core=True)
    torch.manual_seed(4)
    write(folder, "small", Small(), lambda step: ((torch.randn(4, 3),), {}), ({0: BATCH},))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
