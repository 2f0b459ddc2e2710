#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of the GPT of bench/gpu in PyTorch, in the ways that PyTorch has, on one GPU.

usage: gpu_graphs.py [--small]
Prints lines as bench/gpu does, and those of the card's roofs: a matrix product and a copy. A way
that fails is told on stderr, and the others go on. --small: a small model on the CPU, without
graphs and compiled code, to see that it runs.
"""
import argparse
import gc
import statistics
import sys
import time
import traceback

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256
ROUNDS = 3


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, sequence):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.token(x) + self.position(places))))


class Training:
    """The model, its text and its way of training; each way has its own."""

    def __init__(self, small, compiled=False, graph=False, **adamw):
        self.device = "cpu" if small else "cuda"
        layers, width, heads, sequence, self.batch, self.steps = (
            (2, 32, 2, 16, 4, 2) if small else (17, 768, 12, 1024, 8, 10))
        torch.manual_seed(1)
        self.net = GPT(layers, width, heads, sequence).to(self.device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, capturable=graph,
                                           **adamw)
        self.text = torch.randint(VOCABULARY, (self.batch, sequence + 1), device=self.device)
        self.loss_of = torch.compile(self.loss, fullgraph=True) if compiled else self.loss
        self.run = captured(self.step) if graph else self.step

    def loss(self, text):
        # Casts that were kept would lie outside a graph.
        with torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False):
            logits = self.net(text[:, :-1])
            return F.cross_entropy(logits.reshape(-1, VOCABULARY), text[:, 1:].reshape(-1))

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(self.text)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def tokens_per_second(self):
        tokens = self.batch * (self.text.shape[1] - 1)
        return tokens / seconds_of(self.run, self.steps)


def seconds_of(step, steps):
    """The median over rounds of the seconds of a step, which returns its loss."""
    times = []
    for number in range(ROUNDS + 1):
        begin = time.perf_counter()
        for _ in range(steps):
            loss = step()
        loss.item()
        if number > 0:  # the first warms
            times.append((time.perf_counter() - begin) / steps)
    return statistics.median(times)


def captured(step):
    """The step as a CUDA graph, after some on a side stream, as torch.cuda.graph asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay():
        graph.replay()
        return loss
    return replay


def show(name, value, unit):
    print(f"{name}\t{value:.3g}\t{unit}" if value < 100 else f"{name}\t{value:.0f}\t{unit}",
          flush=True)


def train(name, small, **way):
    if not small:
        torch.cuda.reset_peak_memory_stats()
    show(name, Training(small, **way).tokens_per_second(), "tokens/s")
    if not small:
        show(f"{name}, peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")


def seconds_on_the_card(operation, times=10):
    """The mean of a call, between events, after three that warm."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        operation()
    begin.record()
    for _ in range(times):
        operation()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def product_roof(name):
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    seconds = seconds_on_the_card(lambda: torch.mm(a, b, out=out))
    show(name, 2 * size ** 3 / seconds / 1e12, "TFLOP/s")


def copy_roof(name):
    source = torch.ones(2 ** 30, device="cuda")
    target = torch.empty_like(source)
    bytes_moved = 2 * source.numel() * source.element_size()
    show(name, bytes_moved / seconds_on_the_card(lambda: target.copy_(source)) / 1e12, "TB/s")


def measurements(small):
    """Functions and their arguments, those that may take longest at the end."""
    if not small:
        yield product_roof, "the card: bf16 product of matrices of 8192 x 8192", {}
        yield copy_roof, "the card: copy in its memory, read and written", {}
    ways = [("GPT, PyTorch", {"foreach": True}), ("GPT, PyTorch, fused AdamW", {"fused": True})]
    if not small:
        ways += [
            ("GPT, PyTorch, a CUDA graph, fused AdamW", {"fused": True, "graph": True}),
            ("GPT, PyTorch, a CUDA graph", {"foreach": True, "graph": True}),
            ("GPT, PyTorch, compiled, fused AdamW", {"fused": True, "compiled": True}),
            ("GPT, PyTorch, compiled, a CUDA graph, fused AdamW",
             {"fused": True, "compiled": True, "graph": True})]
    for name, way in ways:
        yield train, name, {"small": small, **way}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    well = True
    for measure, name, arguments in measurements(small):
        try:
            measure(name, **arguments)
        except Exception as error:
            well = False
            traceback.print_exc()
            print(f"gpu_graphs: {name}: {type(error).__name__}: {error}", file=sys.stderr)
        gc.collect()  # a model refers to itself by its functions
        if not small:
            torch.cuda.empty_cache()
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
