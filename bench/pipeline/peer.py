"""The same training as worker.cc by torch.distributed.pipelining over gloo, one process for each rank.

Started by compare.py with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

VOCABULARY = 256

# Before the first step torch sends something over every edge, which gloo does not need, and which
# fails where both stages of an edge are on one rank.
pipelining.PipelineStage._get_init_p2p_neighbors_ops = lambda self: []


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
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.contract(nn.functional.gelu(self.expand(self.norm2(x))))


class Part(nn.Module):
    """Some blocks, the embeddings before the first and the head after the last."""

    def __init__(self, options, first, last, blocks):
        super().__init__()
        self.first, self.last = first, last
        if first:
            self.token = nn.Embedding(VOCABULARY, options.width)
            self.position = nn.Embedding(options.sequence, options.width)
        self.blocks = nn.ModuleList(Block(options.width, options.heads) for _ in range(blocks))
        if last:
            self.norm = nn.LayerNorm(options.width)
            self.head = nn.Linear(options.width, VOCABULARY, bias=False)

    def forward(self, x):
        if self.first:
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


SCHEDULES = {
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved_1f1b": (pipelining.ScheduleInterleaved1F1B, 2),
    "looped_bfs": (pipelining.ScheduleLoopedBFS, 2),
    "interleaved_zb": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "zbv": (pipelining.ScheduleZBVZeroBubble, 2),
}


def stages_of(name, rank, ranks, per_rank):
    if name == "zbv":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * i for i in range(per_rank)]


def main():
    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "heads", "sequence", "batch", "microbatches", "steps", "threads"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule_class, per_rank = SCHEDULES[options.schedule]
    count = ranks * per_rank
    device = torch.device("cpu")

    def blocks_of(stage):
        return options.layers // count + (stage < options.layers % count)

    parts = [Part(options, s == 0, s == count - 1, blocks_of(s))
             for s in stages_of(options.schedule, rank, ranks, per_rank)]
    # Given the shapes, torch asks no other rank for them, which fails over gloo for some schedules.
    size = options.batch // options.microbatches
    tokens = torch.zeros(size, options.sequence, dtype=torch.int64)
    between = torch.zeros(size, options.sequence, options.width)
    logits = torch.zeros(size, options.sequence, VOCABULARY)
    stages = [pipelining.PipelineStage(part, s, count, device,
                                       input_args=tokens if part.first else between,
                                       output_args=logits if part.last else between)
              for part, s in zip(parts, stages_of(options.schedule, rank, ranks, per_rank))]

    def loss_of(logits, target):
        return nn.functional.cross_entropy(logits.view(-1, VOCABULARY), target.reshape(-1))

    schedule = schedule_class(stages[0] if per_rank == 1 else stages, options.microbatches,
                              loss_fn=loss_of)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.01)
    x = torch.randint(VOCABULARY, (options.batch, options.sequence))
    y = torch.randint(VOCABULARY, (options.batch, options.sequence))
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)

    def step():
        optimizer.zero_grad()
        inputs = [x] if has_first else []
        if has_last:
            schedule.step(*inputs, target=y, losses=[])
        else:
            schedule.step(*inputs)
        optimizer.step()

    if rank == 0:
        print("set up", flush=True)
        sys.stdin.readline()
    dist.barrier()
    for _ in range(3):
        step()
    if rank == 0:
        print("ready", flush=True)
    for _ in range(options.steps):
        if rank == 0 and not sys.stdin.readline():
            break
        dist.barrier()
        start = time.perf_counter()
        step()
        if rank == 0:
            print(time.perf_counter() - start, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
