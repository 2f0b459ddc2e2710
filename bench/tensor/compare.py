#!/usr/bin/env python3
"""Compares training steps with layers divided over 2 ranks: smp, which rewrites the plain model of
examples/gpt, torch.distributed.tensor.parallel over gloo, and one process.

    bazel build //bench/pipeline:worker //tools:smprun_bin
    bench/tensor/compare.py --model small --torch-python PATH

As ../pipeline/compare.py, whose contenders and models these are. With one microbatch all work on the
whole batch at once; `--microbatches` cuts it for all.
"""

import argparse
import json
import pathlib
import random
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "pipeline"))
from compare import MODELS, ROOT, Contender, arguments, interval, single  # noqa: E402

STYLES = ["plain", "loss", "sequence"]


def ours(worker, model, ranks):
    parameters = {"partitions": 1, "tensor_parallel_degree": ranks, "ddp": True,
                  "prescaled_batch": True, "microbatches": model["microbatches"],
                  "timeout_seconds": 3600}
    return Contender("smp", [
        ([str(ROOT / "bazel-bin/tools/smprun_bin"), "--np", str(ranks), worker,
          *arguments(model)], {"SM_HP_MP_PARAMETERS": json.dumps(parameters)})], ranks)


def torch_peer(python, style, model, ranks, port):
    peer = str(pathlib.Path(__file__).with_name("peer.py"))
    return Contender(f"torch, {style}", [
        ([python, peer, "--style", style, "--threads", "1", *arguments(model)],
         {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
          "MASTER_PORT": str(port)}) for rank in range(ranks)], ranks)


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
    contenders = []
    try:
        compare(options, model, contenders)
    finally:
        for contender in contenders:
            contender.close()


def compare(options, model, contenders):
    worker = str(ROOT / "bazel-bin/bench/pipeline/worker")
    contenders += [single(worker, "one thread", model, 1), single(worker, "two threads", model, 2),
                   ours(worker, model, options.ranks)]
    peers = []
    for style in STYLES if options.torch_python else []:
        peers.append(torch_peer(options.torch_python, style, model, options.ranks,
                                29700 + len(peers)))
        contenders.append(peers[-1])
    for contender in contenders:
        contender.wait_until_ready()
    order = list(contenders)
    for i in range(options.rounds):
        random.Random(i).shuffle(order)
        for contender in order:
            contender.step()
        print(f"\rround {i + 1} of {options.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    best = min(peers or contenders[:1], key=lambda peer: statistics.median(peer.times))
    print(f"{options.model}, {options.microbatches} microbatches, {options.rounds} rounds; ratio: "
          f"{best.name} / step, median of pairs, 95 %\n\n"
          "| contender | step, ms | CPU, s | growth, MiB | ratio |\n|---|---|---|---|---|")
    for contender in contenders:
        ratios = [b / t for b, t in zip(best.times, contender.times)]
        low, high = interval(ratios)
        print(f"| {contender.name} | {1e3 * statistics.median(contender.times):.1f} | "
              f"{statistics.median(contender.cpu):.2f} | {contender.growth():.0f} | "
              f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) |")


if __name__ == "__main__":
    main()
