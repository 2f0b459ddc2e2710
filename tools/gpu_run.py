#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a bundle of tools/gpu_check on a machine with GPUs; it is installed there as `run`.

usage: run [--out FOLDER] [--seconds N] [--only GROUP,...]
Needs a python3 with torch 2.11 for CUDA 13.0, and nothing else. Three groups: `find` tells whether
all is right, several programs at a time; `speed` measures; `deep` counts the host's calls and
checks memory. FOLDER ($OUT, or results beside this file) gets table.md, written anew after each
program, and log.txt with what each has printed: a `run` that is killed loses only what is under
way. Each program has a limit of its own; one that exceeds it leaves the stacks of its threads in
the log. The exit status is 0 if all passed.
"""
import argparse
import collections
import concurrent.futures
import gzip
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

from gpu_report import Report, Tests, ending, rows_of, text_of

HERE = pathlib.Path(__file__).resolve().parent
GROUPS = ("find", "speed", "deep")
TESTS = ("cuda_test", "foreach_test", "parity_test", "models_test", "process_test_program")
PROGRAMS = (*TESTS, "gpt", "gpu")
AT_ONCE = 4  # programs that share the GPU while no time is measured
GRACE = 5  # seconds that the other ranks of a job have when one has failed
STACKS = 40  # seconds that a debugger has
AGAIN = 45  # seconds for those of a program whose tests failed in `find`
LEAST = 2  # seconds with which a program is worth starting

# Ways of `bench:gpu --count STEPS WAY`, and the names that their rows have without --count.
WAYS = {"plain": "GPT, plain libtorch", "1": "GPT, 1 rank", "1g": "GPT, 1 rank, CUDA graphs",
        "2": "GPT, 2 stages", "2g": "GPT, 2 stages, CUDA graphs"}
COUNTED_STEPS = (5, 15)
# Jobs of `gpt` on two stages that share a GPU, whose calls are counted as well: their variables.
SHARING = {"GPT example, two processes": {},
           "GPT example, two processes, through host memory": {"SMP_DEVICE_IPC": "0"}}

# Layouts of `gpt`, with their ranks, which have the same losses: one seed, one set of sums.
EXAMPLE = {"deterministic": True, "microbatches": 4, "gradient_shards": 2}
RESUMED = "GPT example, stopped and resumed"
EXAMPLES = {
    "GPT example": (1, {}),
    "GPT example, CUDA graphs": (1, {"cuda_graphs": "on"}),
    RESUMED: (1, {}),
    "GPT example, two processes": (2, {"partitions": 2}),
    "GPT example, two processes, CUDA graphs": (
        2, {"partitions": 2, "pipeline": "zb_h1", "cuda_graphs": "on"}),
    "GPT example, two replicas": (2, {"ddp": True, "microbatches": 2}),
}
CALLS = {
    "launches": ("cudaLaunchKernel", "__cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel",
                 "cuLaunchKernelEx"),
    "launches of graphs": ("cudaGraphLaunch", "cuGraphLaunch"),
    "waits of the host": ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize",
                          "cudaMemcpy", "cuStreamSynchronize", "cuEventSynchronize",
                          "cuCtxSynchronize"),
    "copies": ("cudaMemcpyAsync", "cuMemcpyAsync", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync",
               "cuMemcpyDtoDAsync"),
    "cudaMalloc": ("cudaMalloc",),
}

MACHINE = """import torch
gpus = torch.cuda.device_count()
print(gpus)
print(f"{gpus} x {torch.cuda.get_device_name(0) if gpus else 'no GPU'}, torch {torch.__version__}, "
      f"CUDA {torch.version.cuda}")
"""


class Check:
    """A program, on the processes of a job, and the expectations of it.

    `kind` is how its output is read: "tests" of GoogleTest, a "bench" that prints values, a
    "program" of which the exit status counts, a "quick" check that has a row only if it fails, a
    list of "libraries", or "lines" that are rows; that of a "debugger" is part of another's.
    `native`: it is linked with libtorch.
    """

    def __init__(self, name, command, limit, kind="tests", ranks=1, least_gpus=1, filter="",
                 environment=None, native=True):
        self.name, self.command, self.limit = name, [str(word) for word in command], limit
        self.kind, self.ranks, self.least_gpus, self.filter = kind, ranks, least_gpus, filter
        self.environment, self.native = environment or {}, native

    def arguments(self):
        return self.command + ([f"--gtest_filter={self.filter}"] if self.filter else [])


class Outcome:
    """How a check's processes ended (None: hung; no statuses: never started), and their outputs."""

    def __init__(self, check, statuses, outputs, seconds=0, stacks=b""):
        self.check, self.statuses, self.outputs = check, statuses, outputs
        self.seconds, self.stacks = seconds, stacks

    def log(self, kept):
        """Its part of the log, with the last `kept` bytes of each output."""
        check = self.check
        text = (f"\n===== {check.name}: {ending(self.statuses) or 'ended well'}, "
                f"{self.seconds:.1f} s: {' '.join(check.arguments())}\n").encode()
        for rank, output in enumerate(self.outputs):
            text += (b"--- rank %d\n" % rank if check.ranks > 1 else b"") + output[-kept:]
        return text + self.stacks[-kept:]


class Processes:
    """All processes that are under way, each the leader of a group, to be ended with its group."""

    def __init__(self):
        self.lock, self.groups, self.closed = threading.Lock(), set(), False

    def start(self, arguments, environment, folder, output):
        with self.lock:
            if self.closed:
                raise OSError("run is being ended")
            process = subprocess.Popen(arguments, env=environment, cwd=folder, stdout=output,
                                       stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT,
                                       start_new_session=True)
            self.groups.add(process.pid)
            return process

    def end(self, process):
        with self.lock:
            kill_group(process.pid)  # also the processes it has left behind
            self.groups.discard(process.pid)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            pass  # it waits for the driver, and the others go on without it

    def end_all(self):
        with self.lock:
            self.closed = True
            for group in self.groups:
                kill_group(group)


def kill_group(group):
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def tool(name):
    """The path of one of CUDA's programs, which may be in no folder of PATH."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/local/cuda/bin"
    return shutil.which(name, path=path) or name


def line_of(file):
    """The text of a file of /proc, which a kernel need not have."""
    try:
        return text_of(file.read_bytes()).strip()
    except OSError as error:
        return error.strerror


def kernel_stacks(group):
    """The kernel's view of each thread of a group's processes: its name, and where it waits."""
    lines = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != group:
                continue
            threads = sorted((process / "task").iterdir(), key=lambda path: int(path.name))
        except OSError:  # it has ended meanwhile
            continue
        for thread in threads:
            name, place, call = (line_of(thread / file) for file in ("comm", "wchan", "syscall"))
            lines.append(f"process {process.name} thread {thread.name} {name}: {place}, "
                         f"system call {call}")
    return "\n".join(lines).encode() + b"\n"


class Bundle:
    """The programs, unpacked into a work folder, and how they are run."""

    def __init__(self, work):
        self.work, self.processes = work, Processes()
        for packed in HERE.glob("*.gz"):
            program = work / packed.stem
            with gzip.open(packed, "rb") as source, open(program, "wb") as target:
                shutil.copyfileobj(source, target)
            program.chmod(0o755)
        self.libraries = ":".join(map(str, [*wheel_folders(), HERE / "lib"]))

    def environment(self, check):
        """The inherited one; programs find torch's libraries and the bundle's before its own.

        The inherited path may be the one to the driver's. A program that crashes shows its stack.
        """
        own = dict(os.environ, PYTHONFAULTHANDLER="1", **check.environment)
        if check.native:
            paths = [self.libraries, os.environ.get("LD_LIBRARY_PATH", "")]
            preloaded = [str(HERE / "crash_stack.so"), own.get("LD_PRELOAD", "")]
            own.update(LD_LIBRARY_PATH=":".join(filter(None, paths)), OMP_NUM_THREADS="1",
                       LD_PRELOAD=":".join(filter(None, preloaded)))
        return own

    def start(self, check, folder):
        """Starts the check's processes as torchrun would; each writes into a file of its own.

        None stands for one that cannot be started.
        """
        processes = []
        port = str(free_port())
        for rank in range(check.ranks):
            # Not TMPDIR: cuda-gdb finds only processes that have its own.
            own = dict(self.environment(check), TEST_TMPDIR=str(folder))
            if check.ranks > 1:
                own.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(check.ranks),
                           LOCAL_WORLD_SIZE=str(check.ranks), MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=port)
            if check.least_gpus < check.ranks:
                own["CUDA_VISIBLE_DEVICES"] = own.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            with open(folder / f"rank{rank}.txt", "wb") as output:
                try:
                    processes.append(self.processes.start(check.arguments(), own, folder, output))
                except OSError as error:
                    output.write(f"cannot start {check.command[0]}: {error}\n".encode())
                    processes.append(None)
        return processes

    def run(self, check, deadline):
        """Runs a check to its end, or to its limit."""
        begin = time.monotonic()
        limit = min(check.limit, deadline - begin)
        if limit < LEAST:
            return Outcome(check, [], [])
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.work))
        processes = self.start(check, folder)
        statuses = wait(processes, begin + limit)
        seconds = time.monotonic() - begin
        stacks = b""
        for rank, process in enumerate(processes):
            if statuses[rank] is None and check.kind != "debugger":
                stacks += b"--- stacks of rank %d, which hangs\n" % rank
                stacks += self.stacks(process.pid, deadline)
        for process in filter(None, processes):
            self.processes.end(process)
        outputs = [(folder / f"rank{rank}.txt").read_bytes() for rank in range(check.ranks)]
        shutil.rmtree(folder, ignore_errors=True)
        return Outcome(check, statuses, outputs, seconds, stacks)

    def stacks(self, pid, deadline):
        """Stacks by CUDA's debugger, and the kernel's view where there is none or it hangs."""
        command = [tool("cuda-gdb"), "-batch", "-nx", "-p", pid, "-ex", "set pagination off",
                   "-ex", "thread apply all bt 30"]
        limit = min(STACKS, max(10, deadline - time.monotonic()))
        ended = self.run(Check("cuda-gdb", command, limit, kind="debugger", native=False),
                         time.monotonic() + limit)
        faults = f"cuda-gdb: {ending(ended.statuses) or 'ended well'}\n".encode()
        return ended.outputs[0] + faults + kernel_stacks(pid)


def wait(processes, end):
    """Their exit statuses; None for those that go on. When one fails, the others have not long."""
    while True:
        statuses = [process.poll() if process else 127 for process in processes]
        if any(statuses):
            end = min(end, time.monotonic() + GRACE)
        if None not in statuses or time.monotonic() > end:
            return statuses
        time.sleep(0.05)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wheel_folders():
    """Where torch's wheel, and those that it needs, have their libraries."""
    torch = importlib.util.find_spec("torch")
    if torch is None:
        sys.exit("run: python3 has no torch")
    nvidia = importlib.util.find_spec("nvidia")
    folders = [pathlib.Path(torch.origin).parent / "lib"]
    for place in nvidia.submodule_search_locations if nvidia else []:
        folders += sorted(pathlib.Path(place).glob("*/lib"))
    return folders


def quick_checks(bundle):
    """Whether programs find their libraries and start at all; the tests that each has."""
    return [
        Check("nvidia-smi", [tool("nvidia-smi")], 10, kind="quick", native=False),
        *(Check(f"libraries of {name}", ["ldd", bundle.work / name], 10, kind="libraries")
          for name in PROGRAMS),
        *(Check(f"list of {name}", [bundle.work / name, "--gtest_list_tests"], 20, kind="quick")
          for name in TESTS)]


def cases_of(listing):
    """Full names of a program's tests, with the texts of their parameters."""
    cases, suite = {}, ""
    for line in listing.splitlines():
        name, _, parameter = line.partition("  # ")
        if re.fullmatch(r"\S+\.", name):
            suite = name
        elif suite and name.startswith("  "):
            cases[suite + name.strip()] = parameter
    return cases


def shards(name, command, count, limit, cases, filter=""):
    """The cases of a program that `filter` chooses, divided among programs of their own."""
    count = min(count, max(1, len(cases)))
    return [Check(f"{name}, {index + 1} of {count}", command, limit, filter=filter,
                  environment={"GTEST_TOTAL_SHARDS": str(count), "GTEST_SHARD_INDEX": str(index)})
            for index in range(count)]


def parity_checks(bundle, cases):
    """Those as CUDA graphs apart from the others."""
    command = [bundle.work / "parity_test"]
    graphs = [name for name, parameter in cases.items() if "graphs" in parameter]
    if not graphs:
        return shards("parity", command, 4, 75, cases)
    eager = [name for name in cases if name not in graphs]
    chosen = ":".join(graphs)
    captured = shards("parity, CUDA graphs", command, 2, 75, graphs, chosen)
    for part in captured:  # ranks that share a GPU get in each other's way only now and then
        part.environment["GTEST_REPEAT"] = "5"
    return [*shards("parity, operator by operator", command, 4, 75, eager, f"*-{chosen}"),
            *captured]


def example_check(bundle, name, ranks, config):
    """Trains the example; the losses of its steps lie in a file, exact to the bit."""
    file = bundle.work / f"{name}.json"
    file.write_text(json.dumps(EXAMPLE | config))
    command = [bundle.work / "gpt", "--device", "cuda", "--data", HERE / "text.txt", "--steps", "20",
               "--sample", "50", "--dropout", "0.1", "--config", file, "--losses",
               bundle.work / f"{name}.losses"]
    if name == RESUMED:
        command = ["sh", "-c", '"$@" --stop-after 10 && "$@" --resume', "sh", *command]
    return Check(name, command, 60, kind="program", ranks=ranks)


def losses_row(bundle):
    """Whether all layouts of the example have the same losses, which fall, and a row that says so."""
    files = {name: bundle.work / f"{name}.losses" for name in EXAMPLES}
    texts = {name: file.read_text() if file.exists() else "" for name, file in files.items()}
    first = next(iter(texts.values()))
    others = [name for name, text in texts.items() if not text or text != first]
    losses = [float.fromhex(line.split()[-1]) for line in first.splitlines()]
    falls = bool(losses) and losses[-1] < losses[0]
    result = ("other bits or none: " + ", ".join(others) if others else
              f"equal in {len(texts)} ways" if falls else
              f"equal in {len(texts)} ways, but from {losses[0]:g} to {losses[-1]:g}")
    return [("GPT example, losses of 20 steps", result, "")], not others and falls


def find_checks(bundle, gpus, cases):
    """`cases`: those of each program of tests."""
    processes = [bundle.work / "process_test_program"]
    two_gpus = [Check("two processes, two GPUs, NCCL", processes, 75, ranks=2, least_gpus=2)]
    return [
        Check("random numbers, messages, collectives, NCCL", [bundle.work / "cuda_test"], 60),
        Check("updates and sums over lists", [bundle.work / "foreach_test"], 120),
        *parity_checks(bundle, cases["parity_test"]),
        *shards("parity of models", [bundle.work / "models_test"], 2, 100, cases["models_test"]),
        Check("two processes on one GPU", processes, 75, ranks=2),
        *(two_gpus if gpus > 1 else []),
        *(example_check(bundle, name, *way) for name, way in EXAMPLES.items())]


def hung(outcome):
    return None in outcome.statuses


def failed_checks(outcomes):
    """The failures once more: one check for each program, with the launch that fails named.

    Those that hung come last: they may take all the time that there is.
    """
    programs = {}
    for outcome in outcomes:
        if outcome.statuses and not rows_of(outcome)[1]:
            key = (*outcome.check.command, outcome.check.ranks, outcome.check.least_gpus)
            programs.setdefault(key, []).append(outcome)
    checks = []
    for failed in sorted(programs.values(), key=lambda failed: any(map(hung, failed))):
        check, tests = failed[0].check, [Tests(outcome.outputs) for outcome in failed]
        names = [name for each in tests for name in each.failed + each.unfinished]
        environment = dict({} if names else check.environment, CUDA_LAUNCH_BLOCKING="1",
                           TORCH_SHOW_CPP_STACKTRACES="1", SMP_BACKTRACE="1")
        checks.append(Check(f"again, blocking launches: {check.name}", check.command, AGAIN,
                            check.kind, check.ranks, check.least_gpus,
                            ":".join(names) or check.filter, environment))
    return checks


def card_check(when):
    fields = "name,driver_version,clocks.sm,power.draw,temperature.gpu,memory.used"
    return Check(f"the card {when} ({fields})",
                 [tool("nvidia-smi"), f"--query-gpu={fields}", "--format=csv,noheader"], 10,
                 kind="lines", native=False)


def counted_checks(bundle):
    """Programs that train, each with fewer and with more steps."""
    file = bundle.work / "two stages.json"
    file.write_text(json.dumps({"partitions": 2, "microbatches": 4}))
    bench = [bundle.work / "gpu", "--count"]
    job = [bundle.work / "gpt", "--device", "cuda", "--data", HERE / "text.txt", "--config", file]
    programs = [(name, 1, {}, lambda steps, way=way: [*bench, steps, way])
                for way, name in WAYS.items()]
    programs += [(name, 2, variables, lambda steps: [*job, "--steps", steps])
                 for name, variables in SHARING.items()]
    counted = {"LD_PRELOAD": str(HERE / "count_calls.so")}
    return [Check(f"calls of {name}, {steps} steps", command(steps), 60, kind="quick", ranks=ranks,
                  environment=counted | variables)
            for name, ranks, variables, command in programs for steps in COUNTED_STEPS]


def calls_of(outcome):
    """How often the ranks called each function of CUDA, from the outputs of count_calls.so."""
    calls = collections.Counter()
    text = text_of(b"".join(outcome.outputs))
    for name, count in re.findall(r"count_calls (\w+) (\d+)\n", text):
        calls[name] += int(count)
    return calls


def calls_a_step(name, few, many):
    """Rows of the calls of runs with fewer and with more steps."""
    steps = COUNTED_STEPS[1] - COUNTED_STEPS[0]
    return [(f"{name}: {what} a step",
             f"{sum(many.get(call, 0) - few.get(call, 0) for call in calls) / steps:g}", "")
            for what, calls in CALLS.items()]


class Run:
    """All groups that are asked for, one after the other."""

    def __init__(self, bundle, report, groups, deadline):
        self.bundle, self.report, self.groups, self.deadline = bundle, report, groups, deadline

    def block(self, checks, at_once=1):
        """Runs the checks, so many at a time, and reports each when it ends."""
        def one(check):
            outcome = self.bundle.run(check, self.deadline)
            self.report.add(outcome)
            return outcome
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, checks))

    def __call__(self):
        """Each group has its part of the time that is left, whatever hangs in those before it."""
        gpus = self.machine()
        if gpus == 0:
            self.report.write([("torch", "finds no GPU on this machine", "")], well=False)
            return
        end, groups = self.deadline, [group for group in GROUPS if group in self.groups]
        for number, group in enumerate(groups):
            now = time.monotonic()
            self.deadline = now + (end - now) / (len(groups) - number)
            try:
                getattr(self, group)(gpus)
            except Exception:  # a fault of this program costs a group only
                self.report.write([(group, "run itself failed, see log.txt", "")], False,
                                  traceback.format_exc().encode())

    def machine(self):
        """Puts the machine at the head of the table, and returns the number of its GPUs."""
        [outcome] = self.block([
            Check("torch", [sys.executable, "-c", MACHINE], 60, kind="quick", native=False)])
        lines = text_of(outcome.outputs[0]).splitlines() if outcome.outputs else []
        if ending(outcome.statuses) or len(lines) < 2:
            return 1  # a row says so; the programs may run all the same
        self.report.machine = lines[-1]
        return int(lines[-2])

    def find(self, gpus):
        outcomes = self.block(quick_checks(self.bundle), AT_ONCE)
        listings = {pathlib.Path(o.check.command[0]).name: cases_of(text_of(b"".join(o.outputs)))
                    for o in outcomes if o.check.command[-1] == "--gtest_list_tests"}
        outcomes = self.block(find_checks(self.bundle, gpus, listings), AT_ONCE)
        self.report.write(*losses_row(self.bundle))
        self.block(failed_checks(outcomes))

    def speed(self, _):
        self.block([
            card_check("before"),
            Check("speed and memory", [self.bundle.work / "gpu"], 100, kind="bench"),
            Check("PyTorch", [sys.executable, HERE / "gpu_graphs.py"], 120, kind="bench",
                  native=False),
            card_check("after")])

    def deep(self, _):
        outcomes = iter(self.block(counted_checks(self.bundle), AT_ONCE))
        for name in (*WAYS.values(), *SHARING):
            few, many = (calls_of(next(outcomes)) for _ in COUNTED_STEPS)
            rows = calls_a_step(name, few, many) if few and many else [
                (f"{name}: calls a step", "not counted", "")]
            self.report.write(rows, bool(few and many))
        # Tests make calls that fail, which are no faults of memory.
        memcheck = [tool("compute-sanitizer"), "--tool", "memcheck", "--report-api-errors", "no",
                    "--error-exitcode", "9", self.bundle.work / "cuda_test"]
        self.block([Check("memcheck of cuda_test", memcheck, 150)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.environ.get("OUT") or HERE / "results",
                        type=pathlib.Path, help="folder of table.md and log.txt")
    parser.add_argument("--seconds", type=float, default=570, help="for all together")
    parser.add_argument("--only", default=",".join(GROUPS), metavar="GROUP,...",
                        help="of %(default)s")
    arguments = parser.parse_args()
    groups = arguments.only.split(",")
    if not set(groups) <= set(GROUPS):
        parser.error(f"--only: expected some of {', '.join(GROUPS)}, got {arguments.only!r}")
    deadline = time.monotonic() + arguments.seconds
    report = Report(arguments.out)
    with tempfile.TemporaryDirectory(prefix="gpu_run", ignore_cleanup_errors=True) as work:
        bundle = Bundle(pathlib.Path(work))

        def stop(number, _):
            bundle.processes.end_all()
            shutil.rmtree(work, ignore_errors=True)
            os._exit(128 + number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop)
        # On another thread, so that a signal never interrupts one that holds a lock.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(Run(bundle, report, groups, deadline)).result()
    sys.exit(0 if report.well else 1)


if __name__ == "__main__":
    main()
