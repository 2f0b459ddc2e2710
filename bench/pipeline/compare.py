#!/usr/bin/env python3
"""Compares training steps of smp with torch.distributed.pipelining and with one process.

    bazel build //bench/pipeline:worker //tools:smprun_bin
    bench/pipeline/compare.py --model small --torch-python PATH

All contenders are started once and then take one step each in turn, in another order each round, so
that what else the machine does hits all alike. PATH is a Python that has torch 2.11 (a virtual
environment with `pip install torch==2.11.0 numpy`); without it there are no peers. The table has
medians, by how much the memory of the rank that grew most grew since it was set up, and the median
of the paired ratios to the best peer with a 95 % interval (bootstrap).
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = {
    "bench": dict(layers=8, width=512, heads=8, sequence=128, batch=16, microbatches=8),
    "small": dict(layers=8, width=128, heads=4, sequence=64, batch=32, microbatches=16),
}
TORCH = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv"]
OURS = ["interleaved", "1f1b", "interleaved_1f1b", "breadth_first", "zb_h1", "zbv", "auto"]
FAST = ["interleaved", "1f1b", "zbv", "auto"]
TICKS = os.sysconf("SC_CLK_TCK")


def arguments(values):
    return [part for key, value in values.items() for part in ("--" + key, str(value))]


def resident(pid):
    """MiB of memory of each process of a program that computes, that is which has loaded libtorch."""
    result = []
    for process in tree(pid):
        if "libtorch_cpu" in pathlib.Path(f"/proc/{process}/maps").read_text():
            status = pathlib.Path(f"/proc/{process}/status").read_text()
            result.append(int(status.split("VmRSS:")[1].split()[0]) / 1024)
    return result


def tree(pid):
    """A process and those that it started."""
    found = [pid]
    for child in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for other in child.read_text().split():
            found += tree(int(other))
    return found


class Contender:
    def __init__(self, name, commands, ranks=None):
        # One process is compared with all cores, a pipeline of one thread for each rank.
        self.name, self.ranks, self.times, self.cpu = name, ranks, [], []
        if ranks:
            self.name += f", {ranks} ranks"
        self.processes = []
        self.log = tempfile.TemporaryFile("w+")
        for command, environment in commands:
            first = not self.processes
            self.processes.append(subprocess.Popen(
                command, stdin=subprocess.PIPE if first else subprocess.DEVNULL,
                stdout=subprocess.PIPE if first else subprocess.DEVNULL,
                stderr=self.log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, text=True))

    def line(self):
        while True:
            text = self.processes[0].stdout.readline()
            if not text:
                raise self.ended_early()
            text = text.strip()
            if text in ("set up", "ready") or text.replace(".", "", 1).replace("e-", "", 1).isdigit():
                return text

    def ended_early(self):
        self.log.seek(0)
        return RuntimeError(f"{self.name} ended early:\n{self.log.read()[-2000:]}")

    def wait_until_ready(self):
        while self.line() != "set up":
            pass
        self.before = self.resident()
        self.say("go")
        while self.line() != "ready":
            pass

    def resident(self):
        return [size for process in self.processes for size in resident(process.pid)]

    def growth(self):
        """MiB by which the rank that has grown most has grown since it was set up."""
        return max(now - before for before, now in zip(self.before, self.resident()))

    def say(self, text):
        try:
            self.processes[0].stdin.write(text + "\n")
            self.processes[0].stdin.flush()
        except BrokenPipeError:
            raise self.ended_early() from None

    def cpu_seconds(self):
        ticks = 0
        for process in self.processes:
            for pid in tree(process.pid):
                fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / TICKS

    def step(self):
        before = self.cpu_seconds()
        self.say("step")
        self.times.append(float(self.line()))
        self.cpu.append(self.cpu_seconds() - before)

    def close(self):
        try:
            self.say("step")  # the last that all ranks expect
            self.processes[0].stdin.close()
        except (BrokenPipeError, RuntimeError):
            pass  # ended already
        for process in self.processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


def single(worker, name, model, threads):
    return Contender(name, [([worker, "--mode", "plain", "--threads", str(threads),
                              *arguments(model)], {})])


def ours(worker, schedule, model, ranks, numerics):
    parameters = {"partitions": ranks, "microbatches": model["microbatches"], "pipeline": schedule,
                  "optimize": "speed", "numerics": numerics,
                  # While all the others are set up and measured, ranks wait.
                  "timeout_seconds": 3600,
                  "gradient_accumulation_fusion": numerics == "fast"}
    # "auto" tries schedules in its first steps.
    warm = {"warm": 14} if schedule == "auto" else {}
    return Contender(f"smp {schedule}" + (", fast" if numerics == "fast" else ""), [
        ([str(ROOT / "bazel-bin/tools/smprun_bin"), "--np", str(ranks), worker,
          *arguments({**model, **warm})],
         {"SM_HP_MP_PARAMETERS": json.dumps(parameters)})], ranks)


def torch_peer(python, schedule, model, ranks, port):
    peer = str(pathlib.Path(__file__).with_name("peer.py"))
    return Contender(f"torch {schedule}", [
        ([python, peer, "--schedule", schedule, "--threads", "1", *arguments(model)],
         {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
          "MASTER_PORT": str(port)}) for rank in range(ranks)], ranks)


def interval(ratios):
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


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
    worker = str(ROOT / "bazel-bin/bench/pipeline/worker")
    contenders = []
    try:
        compare(options, model, worker, contenders)
    finally:
        for contender in contenders:
            contender.close()


def compare(options, model, worker, contenders):
    whole = {**model, "microbatches": 1}
    contenders += [single(worker, "one thread", model, 1), single(worker, "two threads", model, 2),
                  single(worker, "whole batch, two threads", whole, 2)]
    peers = []
    for ranks in options.ranks:
        for name in options.ours:
            contenders.append(ours(worker, name, model, ranks, "exact"))
        for name in options.fast:
            contenders.append(ours(worker, name, model, ranks, "fast"))
        for name in options.peers if options.torch_python else []:
            peers.append(torch_peer(options.torch_python, name, model, ranks, 29600 + len(peers)))
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
        low, high = interval(ratios)
        used = min(cores, contender.ranks or cores)
        print(f"| {contender.name} | {1e3 * step:.1f} | {statistics.median(contender.cpu):.2f} | "
              f"{contender.growth():.0f} | "
              f"{one / (used * step):.2f} | {statistics.median(ratios):.2f} "
              f"({low:.2f} to {high:.2f}) |")


if __name__ == "__main__":
    main()
