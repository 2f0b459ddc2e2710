# SPDX-License-Identifier: Apache-2.0
"""The same training as ../pipeline/worker.cc by torch.distributed.tensor.parallel over gloo, one
process for each rank.

Started by compare.py with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.
"""

import argparse
import contextlib
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput,
                                               RowwiseParallel, SequenceParallel, loss_parallel,
                                               parallelize_module)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from peers import make_batch, take_steps, whole  # noqa: E402


class Attention(nn.Module):
    """Projections apart, as torch's tutorial has them: a fused one cannot be divided by heads."""

    def __init__(self, width, heads):
        super().__init__()
        self.channels = width // heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length = x.shape[:2]
        q, k, v = (f(x).view(batch, length, -1, self.channels).transpose(1, 2)
                   for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def plan_of_block(sequence):
    """torch's tutorial: columns, then rows; between blocks whole, or divided along the sequence."""
    between = Shard(1) if sequence else Replicate()
    plan = {
        "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=between),
        "expand": ColwiseParallel(input_layouts=between),
        "contract": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        plan["norm1"] = plan["norm2"] = SequenceParallel()
        plan["attention"] = PrepareModuleInput(input_layouts=Shard(1),
                                               desired_input_layouts=Replicate())
    return plan


def divide(model, mesh, style):
    sequence = style == "sequence"
    for block in model.blocks:
        parallelize_module(block, mesh, plan_of_block(sequence))
    between = Shard(1) if sequence else Replicate()
    loss = style != "plain"
    plan = {"head": ColwiseParallel(input_layouts=between,
                                    output_layouts=Shard(-1) if loss else Replicate(),
                                    use_local_output=not loss)}
    if sequence:
        plan["token"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["position"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)


def main():
    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "heads", "sequence", "batch", "microbatches", "steps", "threads"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--style", choices=("plain", "loss", "sequence"), required=True,
                        help="loss: cross entropy on divided logits; sequence: and activations "
                        "between blocks divided, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = whole(options, Attention)
    divide(model, mesh, options.style)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = make_batch(options)
    size = options.batch // options.microbatches
    on_parts = loss_parallel if options.style != "plain" else contextlib.nullcontext

    def step():
        optimizer.zero_grad()
        for part in range(options.microbatches):
            samples = slice(part * size, (part + 1) * size)
            with on_parts():
                logits = model(x[samples]).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, y[samples].flatten())
                (loss / options.microbatches).backward()
        optimizer.step()

    take_steps(step, options.steps)


if __name__ == "__main__":
    main()
