# SPDX-License-Identifier: Apache-2.0
"""Jobs get SIGTERM at random moments, under smprun and as torchrun's agent sends it: each leaves a
checkpoint of the step at which it was asked, or of the next one, and one that goes on from there
comes to the weights of a job that is not disturbed. Prints a line for each launcher, and ends with 1
if anything is not as it should be.

    bazel run //tests/failure:preemption -- --times 20

With --torchrun COMMAND a real torchrun is the agent, too. No other job may run meanwhile: its shared
memory would count as left behind."""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

from fault_matrix import LAYOUTS, Programs, differences, processes_with, shared_memory

STEPS = 30
PREEMPTED = 75
LONGEST = 300  # s
AGENTS_PATIENCE = 30  # s, of torchrun's


def free_port():
    with socket.socket() as one:
        one.bind(("", 0))
        return str(one.getsockname()[1])


class Smprun:
    """Starts ranks with smprun, which gets the signal."""

    name = "smprun"

    def __init__(self, programs, config, arguments, environment, log):
        command = [programs.smprun, "--np", "4", "--config", str(config)]
        self.process = subprocess.Popen(command + arguments, env=environment, stdout=log,
                                        stderr=subprocess.STDOUT)

    def ask(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self):
        return self.process.wait(LONGEST)


class Agent:
    """Starts ranks as torchrun's agent does, and ends them as it does when it gets a signal."""

    name = "agent"

    def __init__(self, programs, config, arguments, environment, log):
        del programs
        environment = {**environment, "SM_HP_MP_PARAMETERS": config.read_text(), "WORLD_SIZE": "4",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        self.ranks = [subprocess.Popen(arguments, env={**environment, "RANK": str(rank)},
                                       stdout=log, stderr=subprocess.STDOUT) for rank in range(4)]

    def ask(self):
        for rank in self.ranks:
            rank.send_signal(signal.SIGTERM)
        self.patient_until = time.time() + AGENTS_PATIENCE

    def wait(self):
        until = getattr(self, "patient_until", time.time() + LONGEST)
        statuses = set()
        for rank in self.ranks:
            try:
                statuses.add(rank.wait(max(until - time.time(), 0.01)))
            except subprocess.TimeoutExpired:
                rank.kill()
                statuses.add(rank.wait())
        return statuses.pop() if len(statuses) == 1 else f"statuses {statuses}"


class Torchrun:
    """A real agent."""

    name = "torchrun"
    command = []

    def __init__(self, programs, config, arguments, environment, log):
        del programs
        environment = {**environment, "SM_HP_MP_PARAMETERS": config.read_text()}
        command = self.command + ["--no-python", "--nproc-per-node", "4", "--master-port", free_port()]
        self.process = subprocess.Popen(command + arguments, env=environment, stdout=log,
                                        stderr=subprocess.STDOUT)
        self.is_asked = False

    def ask(self):
        self.is_asked = True
        self.process.send_signal(signal.SIGTERM)

    def wait(self):
        status = self.process.wait(LONGEST)
        # The agent's own status does not tell how its ranks have ended.
        return PREEMPTED if self.is_asked and status != 0 else status


class Job:
    """A training that is asked to stop, and goes on, in one folder."""

    def __init__(self, programs, launcher, layout):
        self.programs, self.launcher = programs, launcher
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.saves, self.times = self.folder / "saves", self.folder / "times"
        self.config = self.folder / "smp.json"
        self.config.write_text(json.dumps({"seed": 3, "preempt_seconds": 100, **LAYOUTS[layout]}))
        self.output = ""

    def steps_done(self):
        return len(self.times.read_text().splitlines()) if self.times.exists() else 0

    def run(self, moment=None):
        """Until its end, or until it is asked: `moment` is a number of steps and seconds after."""
        self.times.unlink(missing_ok=True)
        environment = {**os.environ, "SMP_LOG_LEVEL": "error", "STEPS": str(STEPS), "RESUME": "1",
                       "TIMES": str(self.times), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        with open(self.folder / "log", "w+", encoding="utf-8") as log:
            started = self.launcher(self.programs, self.config, [self.programs.step, str(self.saves)],
                                    environment, log)
            if moment is not None:
                until = time.time() + LONGEST
                while self.steps_done() < moment[0] and time.time() < until:
                    time.sleep(0.001)
                time.sleep(moment[1])
                started.ask()
            status = started.wait()
            log.seek(0)
            self.output = log.read()
        return status

    def last(self):
        return self.saves / f"step_{STEPS}_partial"


def steps_of(checkpoint):
    return json.loads((checkpoint / "index.json").read_text())["step"]


def disturb(programs, launcher, layout, draw, expected):
    """One training that is asked to stop once. Returns the errors."""
    before = shared_memory()
    job = Job(programs, launcher, layout)
    # smprun may be asked before the first step, too.
    least = 0 if launcher is Smprun else 1
    moment = (draw.randrange(least, STEPS - 3), draw.random() * 0.1)
    problems = []
    status = job.run(moment)
    asked = job.saves / "asked_partial"
    if status != PREEMPTED:
        problems.append(f"status {status}: {job.output}")
    elif not asked.exists():
        problems.append(f"no checkpoint: {job.output}")
    else:
        steps = steps_of(asked)
        last = job.output.splitlines()[-1] if job.output else ""
        if launcher is Smprun and not re.fullmatch(
                rf"smprun: preempted: checkpoint .*asked_partial of step {steps}", last):
            problems.append(f"last line: {last}")
        if steps != job.steps_done():
            problems.append(f"{job.steps_done()} steps, and a checkpoint of {steps}")
    left = processes_with(str(job.folder))
    if left:
        problems.append(f"processes left: {left}")
    if shared_memory() - before:
        problems.append(f"shared memory left: {shared_memory() - before}")
    if job.run() != 0:
        problems.append(f"does not go on: {job.output}")
    else:
        found = differences(programs, expected.last(), job.last())
        if found:
            problems.append(f"the last checkpoint: {found}")
    return [f"{launcher.name}, {layout}, step {moment[0]} and {moment[1]:.3f} s: {problem}"
            for problem in problems]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=2, help="of each launcher")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--torchrun", metavar="COMMAND", help="of a real torchrun")
    options = parser.parse_args()
    programs = Programs(pathlib.Path(os.environ.get("SMP_BINARIES", os.getcwd())))
    Torchrun.command = (options.torchrun or "").split()
    launchers = [Smprun, Agent] + ([Torchrun] if options.torchrun else [])
    expected = {}
    for layout in LAYOUTS:
        job = Job(programs, Smprun, layout)
        if job.run() != 0:
            sys.exit(f"undisturbed: {job.output}")
        expected[layout] = job
    problems = []
    for launcher in launchers:
        for number in range(options.times):
            draw = random.Random(f"{options.seed} {launcher.name} {number}")
            layout = draw.choice(sorted(LAYOUTS))
            found = disturb(programs, launcher, layout, draw, expected[layout])
            for problem in found:
                print(problem, file=sys.stderr, flush=True)
            problems += found
        print(f"{launcher.name}: asked {options.times} times, {len(problems)} problems so far",
              flush=True)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
