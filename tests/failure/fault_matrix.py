# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job fail, one in each run, at random moments: in a step, in its start-up, in a save or a
copy, after the last step, and while the job starts again. Shown for each: the first cause that smprun
names, how long it takes, and what is left behind. Every checkpoint that is left, optimizer included,
must equal that of a job that nothing disturbs, and so must those of the job that goes on: by itself
with a recovery, else started once more by hand. Prints a line for each layout, recovery and fault, over
all ranks and moments, and ends with 1 if any cause, checkpoint or cleanliness is not as it should be.

    bazel run //tests/failure:fault_matrix -- --moments 20

A moment follows from a seed: an action of a rank's schedule in a step, its transfers included, a file
call of a save, or a time of the start-up. With one of each, all takes half an hour on two cores. No
other job may run meanwhile: its shared memory would count as left behind."""

import argparse
import dataclasses
import glob
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

STEPS = 12
LAYOUTS = {
    "4 stages": {"partitions": 4, "microbatches": 4, "gradient_shards": 2},
    "2 x 2": {"partitions": 2, "microbatches": 2, "gradient_shards": 2, "ddp": True},
}
LONGEST_REPORT = 14  # lines
START_UP = 1.2  # s, from the start of a rank to its first step, at most
FILE_CALLS = 24  # most calls of a rank in a save or a copy
LONGEST = 300  # s
KILLED = r"rank {}: was ended by signal 9 \(Killed\) and left no message"


@dataclasses.dataclass(frozen=True)
class Fault:
    """The fate of a rank, by mark of restarting_step, and smprun's words for it."""

    name: str
    mark: str
    cause: str = KILLED
    needs_recovery: bool = False


IN_STEP = [
    Fault("kill -9", "action"),
    Fault("SIGSTOP", "stop_at", r"rank {}: is stopped; it has been in .*"),
    Fault("exit", "exit_at", r"rank {}: ended with exit status 7 and left no message"),
    Fault("exception", "throw_at", r"rank {}: .*no such word.*"),
    Fault("out of memory", "memory_at", r"rank {}: .*(memory|alloc).*"),
]
BEFORE_UPDATE = Fault("kill -9 before the update", "update")
IN_SAVE = Fault("kill -9 in a save", "save")
IN_COPY = Fault("kill -9 in a copy", "copy", needs_recovery=True)
BEFORE_INIT = Fault("exit before init", "early",
                    r"rank {}: ended with exit status 3 and left no message")
AFTER_INIT = Fault("kill -9 after init", "begin")
AFTER_LAST_STEP = Fault("kill -9 after the last step", "end")
# These two come from outside, at a time.
IN_START_UP = Fault("kill -9 in the start-up", "")
BETWEEN_STARTS = Fault("kill -9, and again in the next start", "action", needs_recovery=True)
FAULTS = IN_STEP + [BEFORE_UPDATE, IN_SAVE, IN_COPY, BEFORE_INIT, AFTER_INIT, AFTER_LAST_STEP,
                    IN_START_UP, BETWEEN_STARTS]


class Programs:
    def __init__(self, binaries):
        self.ckpt = str(binaries / "tools/smp_ckpt")
        self.smprun = str(binaries / "tools/smprun_bin")
        self.step = str(binaries / "tests/failure/restarting_step")


def differences(programs, one, other):
    """Between two checkpoints, optimizers included, whichever ranks wrote them: text, or ""."""
    found = subprocess.run([programs.ckpt, "diff", one, other], stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, check=False)
    return "" if (found.returncode, found.stdout) == (0, "no difference\n") else found.stdout


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


class Killer(threading.Thread):
    """Kills a rank of a job some time after it has started: its first process, or the first one of
    the next start, where the rank may have another number."""

    def __init__(self, folder, rank, delay, next_start):
        super().__init__(daemon=True)
        self.folder, self.rank, self.delay, self.next_start = folder, rank, delay, next_start
        self.has_killed_at = None
        self.start()

    def environment(self, process):
        """The rank of the start that is meant; nothing if the process is none."""
        try:
            if os.path.basename(os.readlink(f"/proc/{process}/exe")) != "restarting_step":
                return None
            text = pathlib.Path(f"/proc/{process}/environ").read_bytes().decode()
        except OSError:
            return None
        found = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
        return found if ("SMP_RESTART" in found) == self.next_start else None

    def run(self):
        until = time.time() + LONGEST
        while time.time() < until:
            for process in processes_with(str(self.folder)):
                found = self.environment(process)
                if not found or "OMPI_COMM_WORLD_RANK" not in found:
                    continue
                rank = int(found["OMPI_COMM_WORLD_RANK"])
                if rank != self.rank % int(found["OMPI_COMM_WORLD_SIZE"]):
                    continue
                time.sleep(self.delay)
                try:
                    os.kill(process, 9)
                    self.rank, self.has_killed_at = rank, time.time()
                except ProcessLookupError:
                    pass
                return
            time.sleep(0.005)


class Job:
    """A training in a folder of its own, which may be started several times."""

    def __init__(self, programs, layout, recovery="off", timeout=60):
        self.programs = programs
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.saves, self.times = self.folder / "saves", self.folder / "times"
        self.config = self.folder / "smp.json"
        config = {"seed": 3, "timeout_seconds": timeout, **LAYOUTS[layout]}
        if recovery != "off":
            config |= {"recovery": recovery, "recovery_interval": 1}
        self.config.write_text(json.dumps(config))
        self.times.touch()
        self.status, self.output, self.ended = None, "", 0.0
        self.orphans, self.left = [], set()

    def run(self, marks=(), **variables):
        command = [self.programs.smprun, "--np", "4", "--config", str(self.config)]
        command += [self.programs.step, str(self.saves), *marks]
        environment = {**os.environ, "SMP_LOG_LEVEL": "error", "STEPS": str(STEPS),
                       "TIMES": str(self.times), "OMP_NUM_THREADS": "1", "TERM": "dumb", **variables}
        before = shared_memory()
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=LONGEST, check=False)
        self.ended = time.time()
        self.status, self.output = done.returncode, done.stdout
        self.orphans = processes_with(str(self.folder))
        self.left = shared_memory() - before
        return self

    def close(self):
        shutil.rmtree(self.folder)

    def causes(self):
        return re.findall(r"^smprun: first cause: (.*)$", self.output, re.MULTILINE)

    def checkpoints(self):
        """Folders by number of steps."""
        found = self.saves.glob("step_*_partial")
        return {int(path.name.split("_")[1]): path for path in found}

    def noted(self, what):
        """Seconds of all that was noted under a name."""
        lines = (line.split() for line in self.times.read_text().splitlines())
        return [int(at) / 1000 for name, at in lines if name == what]

    def seconds(self, fault_at, step):
        """From the fault until the step was done after all, or until all had ended."""
        done = [at for at in self.noted(str(step)) if at > fault_at]
        return (done[-1] if done else self.ended) - fault_at


def undisturbed(programs, layout):
    """A job whose folder has the checkpoint of every second step."""
    job = Job(programs, layout).run(KEPT=str(STEPS))
    if job.status != 0 or sorted(job.checkpoints()) != list(range(2, STEPS + 1, 2)):
        sys.exit(f"undisturbed: {job.output}")
    return job


def moment_of(fault, rank, layout, recovery, draw, file_calls):
    """The step that is disturbed, and the mark for it."""
    if fault in (IN_START_UP, BEFORE_INIT, AFTER_INIT):
        step = 0
    elif fault is AFTER_LAST_STEP:
        step = STEPS - 1
    elif fault is IN_SAVE and recovery != "off":
        step = draw.choice([STEPS - 3, STEPS - 1])
    elif fault is IN_SAVE:
        step = draw.randrange(1, STEPS, 2)
    else:
        step = draw.randrange(2, STEPS - 2)
    if fault in (IN_SAVE, IN_COPY):
        count = draw.randrange(file_calls)
    else:
        # Each microbatch has a forward, a backward and at least one transfer to or from each.
        count = draw.randrange(4 * LAYOUTS[layout]["microbatches"])
    marked = 0 if fault is AFTER_LAST_STEP else step
    return step, f"{fault.mark}:{rank}:{marked}:{count}"


class Trial:
    """One job that is disturbed, its time and its errors."""

    def __init__(self, programs, layout, recovery, timeout, expected):
        self.programs, self.layout, self.recovery = programs, layout, recovery
        self.timeout, self.expected = timeout, expected
        self.problems, self.seconds = [], None  # s, where the time of the fault is known

    def run(self, fault, rank, draw):
        """Draws moments until one comes before the job, or its disturbed part, is over. False if
        there is none: the rank makes no file call in a save."""
        file_calls = FILE_CALLS
        while True:
            step, mark = moment_of(fault, rank, self.layout, self.recovery, draw, file_calls)
            job = Job(self.programs, self.layout, self.recovery, self.timeout)
            killer = None
            if fault in (IN_START_UP, BETWEEN_STARTS):
                killer = Killer(job.folder, rank, draw.random() * START_UP,
                                next_start=fault is BETWEEN_STARTS)
            job.run([mark] if fault.mark else [])
            # A signal also reaches a rank that has ended by itself.
            if len(job.causes()) >= (2 if fault is BETWEEN_STARTS else 1):
                break
            self.check_undisturbed(job)
            job.close()
            if file_calls == 1:
                return False
            file_calls //= 2
        self.check(job, fault, rank, killer, step)
        where = f"{self.layout}, {self.recovery}, {fault.name} of rank {rank}, {mark}"
        self.problems = [f"{where}: {problem}" for problem in self.problems]
        job.close()
        return True

    def check_undisturbed(self, job):
        if job.status != 0 and not job.causes():
            self.problems.append(f"no fault, and status {job.status}: {job.output}")
        self.check_checkpoints(job)

    def check(self, job, fault, rank, killer, step):
        causes = job.causes()
        if not causes or not re.fullmatch(fault.cause.format(rank), causes[0]):
            self.problems.append(f"cause: {causes}")
        if fault is BETWEEN_STARTS and (
                len(causes) < 2 or not re.fullmatch(KILLED.format(killer.rank), causes[1])):
            self.problems.append(f"second cause: {causes}, not rank {killer.rank}")
        if (job.status == 0) != (self.recovery != "off"):
            self.problems.append(f"status {job.status}: {job.output}")
        report = job.output.split("smprun: restart")[0]
        if len(report.splitlines()) > LONGEST_REPORT:
            self.problems.append(f"a long report: {job.output}")
        if job.orphans:
            self.problems.append(f"processes left: {job.orphans}")
        if job.left:
            self.problems.append(f"shared memory left: {job.left}")
        faults = [killer.has_killed_at] if killer else job.noted("fault")
        if faults:
            self.seconds = job.seconds(faults[0], step)
        self.check_checkpoints(job)
        if self.recovery == "off" and job.run(RESUME="1").status != 0:
            self.problems.append(f"does not go on by hand: {job.output}")
        self.check_checkpoints(job)
        if STEPS not in job.checkpoints():
            self.problems.append(f"no last checkpoint: {job.output}")

    def check_checkpoints(self, job):
        for steps, path in job.checkpoints().items():
            found = differences(self.programs, self.expected[steps], path)
            if found:
                self.problems.append(f"checkpoint of step {steps}: {found}")


def try_fault(programs, options, reference, layout, recovery, fault):
    """All runs of a fault: prints its line of the table, and returns the errors."""
    runs, seconds, wrong = 0, [], []
    for rank in range(4):
        for moment in range(options.moments):
            draw = random.Random(f"{options.seed} {layout} {recovery} {fault.name} {rank} {moment}")
            trial = Trial(programs, layout, recovery, options.timeout, reference.checkpoints())
            runs += trial.run(fault, rank, draw)
            if trial.seconds is not None:
                seconds.append(trial.seconds)
            wrong += trial.problems
            for problem in trial.problems:
                print(problem, file=sys.stderr, flush=True)
    took = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else "-"
    print(f"| {layout} | {recovery} | {fault.name} | {runs} | {took} | {len(wrong)} |", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=1, help="of each fault of each rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=4, help="\"timeout_seconds\", for SIGSTOP")
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--recovery", choices=["off", "restart", "shrink"], action="append")
    parser.add_argument("--fault", choices=[fault.name for fault in FAULTS], action="append")
    options = parser.parse_args()
    programs = Programs(pathlib.Path(os.environ.get("SMP_BINARIES", os.getcwd())))
    faults = [fault for fault in FAULTS if not options.fault or fault.name in options.fault]
    problems = []
    print("| layout | recovery | fault | runs | seconds, median (most) | wrong |")
    print("|---|---|---|---|---|---|")
    for layout in options.layout or LAYOUTS:
        reference = undisturbed(programs, layout)
        for recovery in options.recovery or ["off", "restart", "shrink"]:
            for fault in faults:
                if recovery != "off" or not fault.needs_recovery:
                    problems += try_fault(programs, options, reference, layout, recovery, fault)
        reference.close()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
