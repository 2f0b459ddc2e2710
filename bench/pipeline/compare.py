#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares training steps of smp with torch.distributed.pipelining and with one process.

    bazel build //bench/pipeline:worker //tools:smprun_bin
    bench/pipeline/compare.py --model small --torch-python PATH

Contenders run as bench/contenders.py says. PATH is a Python that has torch 2.11 (a virtual
environment with `pip install torch==2.11.0 numpy`); without it there are no peers. The table has
medians, by how much the memory of the rank that grew most grew since it was set up, and the median
of the paired ratios to the best peer with a 95 % interval (bootstrap).
"""

import argparse
import json
import os
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from contenders import (GPT, MODELS, Contender, arguments, closing, middle, single,  # noqa: E402
                        smprun, take_rounds, torch_ranks)

TORCH = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv"]
OURS = ["interleaved", "1f1b", "interleaved_1f1b", "breadth_first", "zb_h1", "zbv", "auto"]
FAST = ["interleaved", "1f1b", "zbv", "auto"]


def ours(schedule, model, ranks, numerics):
    parameters = {"partitions": ranks, "microbatches": model["microbatches"], "pipeline": schedule,
                  "optimize": "speed", "numerics": numerics,
                  # While all the others are set up and measured, ranks wait.
                  "timeout_seconds": 3600,
                  "gradient_accumulation_fusion": numerics == "fast"}
    # "auto" tries schedules in its first steps.
    warm = {"warm": 14} if schedule == "auto" else {}
    return Contender(f"smp {schedule}" + (", fast" if numerics == "fast" else ""), [
        (smprun(ranks, GPT, *arguments({**model, **warm})),
         {"SM_HP_MP_PARAMETERS": json.dumps(parameters)})], ranks)


def torch_peer(python, schedule, model, ranks, port):
    values = {"schedule": schedule, "threads": 1, **model}
    return Contender(f"torch {schedule}",
                     torch_ranks(python, pathlib.Path(__file__).with_name("peer.py"), values, ranks,
                                 port), ranks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--torch-python", help="a Python that has torch 2.11")
    parser.add_argument("--ours", nargs="*", default=OURS, help="schedules of smp")
    parser.add_argument("--fast", nargs="*", default=FAST,
                        help="schedules of smp with \"numerics\": \"fast\"")
    parser.add_argument("--peers", nargs="*", default=TORCH, help="schedules of torch")
    options = parser.parse_args()
    # One more, so that all still wait when their memory is read; `close` lets it run.
    model = {**MODELS[options.model], "steps": options.rounds + 1}
    with closing() as contenders:
        compare(options, model, contenders)


def compare(options, model, contenders):
    whole = {**model, "microbatches": 1}
    contenders += [single("one thread", model, 1), single("two threads", model, 2),
                   single("whole batch, two threads", whole, 2)]
    peers = []
    for ranks in options.ranks:
        for name in options.ours:
            contenders.append(ours(name, model, ranks, "exact"))
        for name in options.fast:
            contenders.append(ours(name, model, ranks, "fast"))
        for name in options.peers if options.torch_python else []:
            peers.append(torch_peer(options.torch_python, name, model, ranks, 29600 + len(peers)))
            contenders.append(peers[-1])
    take_rounds(contenders, options.rounds)
    one = statistics.median(contenders[0].times)
    best = min(peers, key=lambda peer: statistics.median(peer.times)) if peers else contenders[0]
    cores = len(os.sched_getaffinity(0))
    print(f"{options.model}, {cores} cores, {options.rounds} rounds; efficiency: one thread / "
          f"(cores in use x step); ratio: {best.name} / step, median of pairs, 95 %\n")
    print("| contender | step, ms | CPU, s | growth, MiB | efficiency | ratio |\n"
          "|---|---|---|---|---|---|")
    for contender in contenders:
        step = statistics.median(contender.times)
        ratios = [b / t for b, t in zip(best.times, contender.times)]
        used = min(cores, contender.ranks or cores)
        print(f"| {contender.name} | {1e3 * step:.1f} | {statistics.median(contender.cpu):.2f} | "
              f"{contender.growth():.0f} | "
              f"{one / (used * step):.2f} | {middle(ratios)} |")


if __name__ == "__main__":
    main()
