# SPDX-License-Identifier: Apache-2.0
"""The common part of the contenders that train with torch: the model of examples/gpt, and
the loop that takes a step whenever a compare.py asks for one.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

VOCABULARY = 256


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.contract(nn.functional.gelu(self.expand(self.norm2(x))))


class Part(nn.Module):
    """Some blocks of a GPT, the embeddings before the first and the head after the last."""

    def __init__(self, options, first, last, blocks, attention=Attention):
        super().__init__()
        self.first, self.last = first, last
        if first:
            self.token = nn.Embedding(VOCABULARY, options.width)
            self.position = nn.Embedding(options.sequence, options.width)
        self.blocks = nn.ModuleList(Block(options.width, attention(options.width, options.heads))
                                    for _ in range(blocks))
        if last:
            self.norm = nn.LayerNorm(options.width)
            self.head = nn.Linear(options.width, VOCABULARY, bias=False)

    def forward(self, x):
        if self.first:
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def whole(options, attention=Attention):
    return Part(options, True, True, options.layers, attention)


def make_batch(options):
    """Tokens and targets."""
    shape = options.batch, options.sequence
    return torch.randint(VOCABULARY, shape), torch.randint(VOCABULARY, shape)


def take_steps(step, steps):
    """The protocol of compare.py for a contender: rank 0 takes each step when it has read a
    line, and prints how long it took."""
    rank = dist.get_rank()
    if rank == 0:
        print("set up", flush=True)
        sys.stdin.readline()
    dist.barrier()
    for _ in range(3):
        step()
    if rank == 0:
        print("ready", flush=True)
    for _ in range(steps):
        if rank == 0 and not sys.stdin.readline():
            break
        dist.barrier()
        start = time.perf_counter()
        step()
        if rank == 0:
            print(time.perf_counter() - start, flush=True)
    dist.destroy_process_group()
