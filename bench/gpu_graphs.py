#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of the GPT of bench/gpu in PyTorch, plain and as a CUDA graph, on one GPU.

usage: gpu_graphs.py [--small]
Prints lines as bench/gpu does. --small: a small model on the CPU, without graphs, to see that it
runs.
"""
import argparse
import statistics
import time

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
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    device = "cpu" if small else "cuda"
    layers, width, heads, sequence, batch, steps = (
        (2, 32, 2, 16, 4, 2) if small else (17, 768, 12, 1024, 8, 10))
    torch.manual_seed(1)
    net = GPT(layers, width, heads, sequence).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True, capturable=not small)
    text = torch.randint(VOCABULARY, (batch, sequence + 1), device=device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        # Casts that were kept would lie outside a graph.
        with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False):
            logits = net(text[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), text[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    ways = [("GPT, PyTorch", step)]
    if not small:
        ways.append(("GPT, PyTorch with a CUDA graph", captured(step)))
    for name, way in ways:
        print(f"{name}\t{batch * sequence / seconds_of(way, steps):.0f}\ttokens/s", flush=True)


if __name__ == "__main__":
    main()
