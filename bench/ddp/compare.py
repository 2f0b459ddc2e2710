#!/usr/bin/env python3
"""Compares data-parallel training steps of smp and of PyTorch with the step without communication.

    bazel build -c opt //bench/ddp:worker //tools:smprun_bin
    bench/ddp/compare.py --model convnet --torch-python PATH

Contenders run as in bench/pipeline/compare.py: started once, then a step each in turn, in another
order each round. "barrier" is the step without communication but with a barrier between backward and
optimizer, where replicas must wait for each other whatever they communicate with. Ratios are step /
barrier of the same library, medians of pairs with a 95 % interval. PATH is a Python that has torch
2.11 (`pip install torch==2.11.0 numpy`); without it there are no peers.
"""

import argparse
import pathlib
import random
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/pipeline"))
from compare import Contender, arguments, interval  # noqa: E402

BATCH = {"convnet": 64, "gpt": 8}


def ours(mode, options, **more):
    worker = str(ROOT / "bazel-bin/bench/ddp/worker")
    values = {"mode": mode, "model": options.model, "batch": options.batch,
              "steps": options.rounds + 1, "threads": 1, **more}
    name = " ".join(["smp", mode, *more.values()])
    return Contender(name, [([str(ROOT / "bazel-bin/tools/smprun_bin"), "--config",
                              str(ROOT / "examples/mnist_ddp/ddp.json"), "--np",
                              str(options.ranks), worker, *arguments(values)], {})])


def torch_peer(mode, options, port):
    peer = str(pathlib.Path(__file__).with_name("ddp_peer.py"))
    values = {"mode": mode, "model": options.model, "batch": options.batch,
              "steps": options.rounds + 1, "threads": 1}
    return Contender(f"torch {mode}", [
        ([options.torch_python, peer, *arguments(values)],
         {"RANK": str(rank), "WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1",
          "MASTER_PORT": str(port)}) for rank in range(options.ranks)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(BATCH), default="convnet")
    parser.add_argument("--batch", type=int, help="samples of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--torch-python", help="a Python that has torch 2.11")
    options = parser.parse_args()
    options.batch = options.batch or BATCH[options.model]
    contenders = []
    try:
        compare(options, contenders)
    finally:
        for contender in contenders:
            contender.close()


def compare(options, contenders):
    pairs = [(ours("ddp", options), ours("barrier", options))]
    contenders += pairs[0]
    if options.torch_python:
        pairs.append((torch_peer("ddp", options, 29710), torch_peer("barrier", options, 29711)))
        contenders += pairs[1]
    for contender in contenders:
        contender.wait_until_ready()
    order = list(contenders)
    for i in range(options.rounds):
        random.Random(i).shuffle(order)
        for contender in order:
            contender.step()
        print(f"\rround {i + 1} of {options.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    base_of = {id(step): base for step, base in pairs}
    print(f"{options.model}, {options.ranks} ranks, batch {options.batch} each, {options.rounds} "
          "rounds; ratio: step / barrier, median of pairs, 95 %\n")
    print("| contender | step, ms | CPU, s | ratio |\n|---|---|---|---|")
    for contender in contenders:
        base = base_of.get(id(contender), contender)
        ratios = [t / b for t, b in zip(contender.times, base.times)]
        low, high = interval(ratios)
        print(f"| {contender.name} | {1e3 * statistics.median(contender.times):.1f} | "
              f"{statistics.median(contender.cpu):.3f} | {statistics.median(ratios):.3f} "
              f"({low:.3f} to {high:.3f}) |")


if __name__ == "__main__":
    main()
