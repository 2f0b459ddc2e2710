#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares data-parallel training steps of smp and of PyTorch with the step without communication.

    bazel build -c opt //bench/ddp:worker //tools:smprun_bin
    bench/ddp/compare.py --model convnet --torch-python PATH

Contenders run as bench/contenders.py says. "barrier" is the step without communication but with a
barrier between backward and optimizer, where replicas must wait for each other whatever they
communicate with. Ratios are step / barrier of the same library, medians of pairs with a 95 %
interval. PATH is a Python that has torch 2.11 (`pip install torch==2.11.0 numpy`); without it there
are no peers.
"""

import argparse
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from contenders import (ROOT, Contender, arguments, closing, middle, smprun,  # noqa: E402
                        take_rounds, torch_ranks)

BATCH = {"convnet": 64, "gpt": 8}


def values_of(mode, options):
    return {"mode": mode, "model": options.model, "batch": options.batch,
            "steps": options.rounds + 1, "threads": 1}


def ours(mode, options):
    return Contender(f"smp {mode}", [
        (smprun(options.ranks, "--config", str(ROOT / "examples/mnist_ddp/ddp.json"),
                str(ROOT / "bazel-bin/bench/ddp/worker"), *arguments(values_of(mode, options))),
         {})])


def torch_peer(mode, options, port):
    return Contender(f"torch {mode}",
                     torch_ranks(options.torch_python,
                                 pathlib.Path(__file__).with_name("ddp_peer.py"),
                                 values_of(mode, options), options.ranks, port))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(BATCH), default="convnet")
    parser.add_argument("--batch", type=int, help="samples of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--torch-python", help="a Python that has torch 2.11")
    options = parser.parse_args()
    options.batch = options.batch or BATCH[options.model]
    with closing() as contenders:
        compare(options, contenders)


def compare(options, contenders):
    pairs = [(ours("ddp", options), ours("barrier", options))]
    contenders += pairs[0]
    if options.torch_python:
        pairs.append((torch_peer("ddp", options, 29710), torch_peer("barrier", options, 29711)))
        contenders += pairs[1]
    take_rounds(contenders, options.rounds)
    base_of = {id(step): base for step, base in pairs}
    print(f"{options.model}, {options.ranks} ranks, batch {options.batch} each, {options.rounds} "
          "rounds; ratio: step / barrier, median of pairs, 95 %\n")
    print("| contender | step, ms | CPU, s | ratio |\n|---|---|---|---|")
    for contender in contenders:
        base = base_of.get(id(contender), contender)
        ratios = [t / b for t, b in zip(contender.times, base.times)]
        print(f"| {contender.name} | {1e3 * statistics.median(contender.times):.1f} | "
              f"{statistics.median(contender.cpu):.3f} | {middle(ratios, 3)} |")


if __name__ == "__main__":
    main()
