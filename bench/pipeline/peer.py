# SPDX-License-Identifier: Apache-2.0
"""The same training as worker.cc by torch.distributed.pipelining over gloo, one process for each rank.

Started by compare.py with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.
"""

import argparse
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from peers import VOCABULARY, Part, make_batch, take_steps  # noqa: E402

# Before the first step torch sends something over every edge, which gloo does not need, and which
# fails where both stages of an edge are on one rank.
pipelining.PipelineStage._get_init_p2p_neighbors_ops = lambda self: []


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
    x, y = make_batch(options)
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

    take_steps(step, options.steps)


if __name__ == "__main__":
    main()
