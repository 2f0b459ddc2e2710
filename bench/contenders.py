# SPDX-License-Identifier: Apache-2.0
"""Programs that are compared: all are started once and then take one step each in turn, in another
order each round, so that what else the machine does hits all alike.
"""

import contextlib
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
GPT = str(ROOT / "bazel-bin/bench/pipeline/worker")
MODELS = {
    "bench": dict(layers=8, width=512, heads=8, sequence=128, batch=16, microbatches=8),
    "small": dict(layers=8, width=128, heads=4, sequence=64, batch=32, microbatches=16),
}


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


def single(name, model, threads):
    """The GPT in one process of plain libtorch."""
    return Contender(name, [([GPT, "--mode", "plain", "--threads", str(threads),
                              *arguments(model)], {})])


def smprun(ranks, *command):
    return [str(ROOT / "bazel-bin/tools/smprun_bin"), "--np", str(ranks), *command]


def torch_ranks(python, script, values, ranks, port):
    """The commands of a program for torch, one for each rank."""
    return [([python, str(script), *arguments(values)],
             {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port)}) for rank in range(ranks)]


@contextlib.contextmanager
def closing():
    """A list for contenders, which are closed at the end."""
    contenders = []
    try:
        yield contenders
    finally:
        for contender in contenders:
            contender.close()


def take_rounds(contenders, rounds):
    for contender in contenders:
        contender.wait_until_ready()
    order = list(contenders)
    for i in range(rounds):
        random.Random(i).shuffle(order)
        for contender in order:
            contender.step()
        print(f"\rround {i + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def middle(ratios, digits=2):
    """The median of paired ratios with its 95 % interval (bootstrap)."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return (f"{statistics.median(ratios):.{digits}f} "
            f"({medians[50]:.{digits}f} to {medians[1949]:.{digits}f})")
