#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares training steps with layers divided over 2 ranks: smp, which rewrites the plain model of
examples/gpt, torch.distributed.tensor.parallel over gloo, and one process.

    bazel build //bench/pipeline:worker //tools:smprun_bin
    bench/tensor/compare.py --model small --torch-python PATH

As ../pipeline/compare.py, with the same models. With one microbatch all work on the whole batch at
once; `--microbatches` cuts it for all.
"""

import argparse
import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from contenders import (GPT, MODELS, Contender, arguments, closing, middle, single,  # noqa: E402
                        smprun, take_rounds, torch_ranks)

STYLES = ["plain", "loss", "sequence"]


def ours(optimize, model, ranks):
    parameters = {"partitions": 1, "tensor_parallel_degree": ranks, "ddp": True,
                  "prescaled_batch": True, "optimize": optimize,
                  "microbatches": model["microbatches"], "timeout_seconds": 3600}
    environment = {"SM_HP_MP_PARAMETERS": json.dumps(parameters)}
    return Contender(f"smp, {optimize}",
                     [(smprun(ranks, GPT, *arguments(model)), environment)], ranks)


def torch_peer(python, style, model, ranks, port):
    values = {"style": style, "threads": 1, **model}
    return Contender(f"torch, {style}",
                     torch_ranks(python, pathlib.Path(__file__).with_name("peer.py"), values, ranks,
                                 port), ranks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--torch-python", help="a Python that has torch 2.11")
    options = parser.parse_args()
    model = {**MODELS[options.model], "microbatches": options.microbatches,
             "steps": options.rounds + 1}
    with closing() as contenders:
        compare(options, model, contenders)


def compare(options, model, contenders):
    contenders += [single("one thread", model, 1), single("two threads", model, 2),
                   ours("speed", model, options.ranks), ours("memory", model, options.ranks)]
    peers = []
    for style in STYLES if options.torch_python else []:
        peers.append(torch_peer(options.torch_python, style, model, options.ranks,
                                29700 + len(peers)))
        contenders.append(peers[-1])
    take_rounds(contenders, options.rounds)
    best = min(peers or contenders[:1], key=lambda peer: statistics.median(peer.times))
    print(f"{options.model}, {options.microbatches} microbatches, {options.rounds} rounds; ratio: "
          f"{best.name} / step, median of pairs, 95 %\n\n"
          "| contender | step, ms | CPU, s | growth, MiB | ratio |\n|---|---|---|---|---|")
    for contender in contenders:
        ratios = [b / t for b, t in zip(best.times, contender.times)]
        print(f"| {contender.name} | {1e3 * statistics.median(contender.times):.1f} | "
              f"{statistics.median(contender.cpu):.2f} | {contender.growth():.0f} | "
              f"{middle(ratios)} |")


if __name__ == "__main__":
    main()
