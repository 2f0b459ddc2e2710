# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job fail, one in each run, at random moments: what smprun says of it, how long it takes,
what is left behind, and whether a job that goes on comes to the weights of one that is not disturbed.
Prints a line for each layout, recovery and fault, over all ranks and moments, and ends with 1 if any
cause, weight or cleanliness is not as it should be.

    bazel run //tests/failure:fault_matrix -- --moments 20

A moment is an action of a rank's schedule in a step, its transfers included, by a seed. With one of
each, all takes some eight minutes on two cores. No other job may run meanwhile: its shared memory
would count as left behind."""

import argparse
import glob
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time

STEPS = 12
LAYOUTS = {
    "4 stages": {"partitions": 4, "microbatches": 4, "gradient_shards": 2},
    "2 x 2": {"partitions": 2, "microbatches": 2, "gradient_shards": 2, "ddp": True},
}
LONGEST_REPORT = 14  # lines
FAULTS = {  # by mark of restarting_step: its name here, and what smprun is to say of it
    "action": ("kill -9", r"rank {}: was ended by signal 9 \(Killed\) and left no message"),
    "stop_at": ("SIGSTOP", r"rank {}: is stopped; it has been in .*"),
    "exit_at": ("exit", r"rank {}: ended with exit status 7 and left no message"),
    "throw_at": ("exception", r"rank {}: .*no such word.*"),
    "memory_at": ("out of memory", r"rank {}: .*(memory|alloc).*"),
}


class Programs:
    def __init__(self, binaries):
        self.ckpt = str(binaries / "tools/smp_ckpt")
        self.smprun = str(binaries / "tools/smprun_bin")
        self.step = str(binaries / "tests/failure/restarting_step")


def hashes(programs, checkpoint):
    """Of all tensors of a checkpoint, by name: the same whoever wrote its files."""
    found = subprocess.run([programs.ckpt, "hashes", checkpoint], stdout=subprocess.PIPE, check=True)
    assert found.stdout, checkpoint
    return found.stdout


def processes_with(text):
    """The numbers of processes that have a text in their command."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                if text.encode() in file.read():
                    found.append(int(path.split("/")[2]))
        except OSError:
            continue
    return found


def shared_memory():
    return set(os.listdir("/dev/shm"))


class Job:
    """One start of smprun, and what came of it."""

    def __init__(self, programs, layout, recovery, timeout, mark=None):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        config = {"seed": 3, "timeout_seconds": timeout, **LAYOUTS[layout]}
        if recovery != "off":
            config |= {"recovery": recovery, "recovery_interval": 1}
        (self.folder / "smp.json").write_text(json.dumps(config))
        saves, self.times = self.folder / "saves", self.folder / "times"
        command = [programs.smprun, "--np", "4", "--config", str(self.folder / "smp.json")]
        command += [programs.step, str(saves)] + ([mark] if mark else [])
        environment = {**os.environ, "SMP_LOG_LEVEL": "error", "STEPS": str(STEPS),
                       "TIMES": str(self.times), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        before = shared_memory()
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
        self.ended = time.time()
        self.status, self.output = done.returncode, done.stdout
        self.orphans = processes_with(str(self.folder))
        self.left = shared_memory() - before
        last = saves / f"step_{STEPS}_partial"
        self.hashes = hashes(programs, last) if last.exists() else None

    def cause(self):
        said = re.search(r"^smprun: first cause: (.*)$", self.output, re.MULTILINE)
        return said.group(1) if said else "nothing"

    def seconds(self, step):
        """From the fault until the step was done after all, or until all had ended."""
        lines = [line.split() for line in self.times.read_text().splitlines()]
        fault = next(int(at) for what, at in lines if what == "fault") / 1000
        done = [int(at) / 1000 for what, at in lines if what == str(step)]
        return (done[-1] if done else self.ended) - fault


def disturb(programs, layout, recovery, fault, rank, draw, timeout, expected):
    """One run. Returns the seconds and what is wrong."""
    # Each microbatch has a forward, a backward and at least one transfer to or from each.
    actions = 4 * LAYOUTS[layout]["microbatches"]
    step, action = draw.randrange(2, STEPS - 2), draw.randrange(actions)
    job = Job(programs, layout, recovery, timeout, f"{fault}:{rank}:{step}:{action}")
    problems = []
    if not re.fullmatch(FAULTS[fault][1].format(rank), job.cause()):
        problems.append(f"cause: {job.cause()}")
    if (job.status == 0) != (recovery != "off"):
        problems.append(f"status {job.status}: {job.output}")
    if recovery != "off" and job.hashes != expected:
        problems.append("other weights")
    report = job.output[: job.output.find("smprun: restart")] if recovery != "off" else job.output
    if len(report.splitlines()) > LONGEST_REPORT:
        problems.append(f"a long report: {job.output}")
    if job.orphans:
        problems.append(f"processes left: {job.orphans}")
    if job.left:
        problems.append(f"shared memory left: {job.left}")
    where = f"{layout}, {recovery}, {FAULTS[fault][0]} of rank {rank}, step {step}, action {action}"
    return job.seconds(step), [f"{where}: {problem}" for problem in problems]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=1, help="of each fault of each rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=4, help="\"timeout_seconds\", for SIGSTOP")
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--recovery", choices=["off", "restart", "shrink"], action="append")
    parser.add_argument("--fault", choices=FAULTS, action="append")
    options = parser.parse_args()
    programs = Programs(pathlib.Path(os.environ.get("SMP_BINARIES", os.getcwd())))
    problems = []
    print("| layout | recovery | fault | runs | seconds, median (most) | wrong |")
    print("|---|---|---|---|---|---|")
    for layout in options.layout or LAYOUTS:
        expected = Job(programs, layout, "off", options.timeout).hashes
        for recovery in options.recovery or ["off", "restart", "shrink"]:
            for fault in options.fault or FAULTS:
                seconds, wrong = [], []
                for rank in range(4):
                    for moment in range(options.moments):
                        draw = random.Random(f"{options.seed} {layout} {recovery} {fault} {rank} {moment}")
                        taken, found = disturb(programs, layout, recovery, fault, rank, draw,
                                               options.timeout, expected)
                        seconds.append(taken)
                        wrong += found
                        for problem in found:
                            print(problem, file=sys.stderr, flush=True)
                problems += wrong
                print(f"| {layout} | {recovery} | {FAULTS[fault][0]} | {len(seconds)} | "
                      f"{statistics.median(seconds):.1f} ({max(seconds):.1f}) | {len(wrong)} |",
                      flush=True)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
