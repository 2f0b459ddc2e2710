#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a bundle of tools/gpu_check runs on a machine with GPUs, as its program `run`.

usage: run [--seconds N]
Needs a python3 with torch 2.11 for CUDA 13.0, and nothing else. Runs all tests and benches of the
bundle, prints a table, and leaves it in table.md with the outputs beside it. The exit status is 0
if all passed.
"""
import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent


class Check:
    """A program of the bundle, on processes of a job."""

    def __init__(self, name, program, ranks=1, arguments=(), least_gpus=1, kind="tests"):
        self.name, self.program, self.ranks = name, program, ranks
        self.arguments, self.least_gpus, self.kind = arguments, least_gpus, kind


def checks(gpus):
    """What is run where there are so many GPUs."""
    result = [
        Check("parity with plain libtorch, ranks as threads", "parity_test"),
        Check("random numbers, messages, collectives", "cuda_test"),
        Check("two processes on one GPU", "process_test_program", ranks=2),
        Check("speed and memory", "gpu", kind="bench"),
        Check("PyTorch, with a CUDA graph", "gpu_graphs.py", kind="bench"),
    ]
    if gpus > 1:
        result.insert(3, Check("two processes, two GPUs, NCCL", "process_test_program", ranks=2,
                               least_gpus=2))
    return result


def free_port():
    with socket.socket() as sock:
        sock.bind(("", 0))
        return sock.getsockname()[1]


def start(check, environment, out):
    """Starts the check's processes as torchrun would."""
    processes = []
    port = str(free_port())
    for rank in range(check.ranks):
        own = dict(environment, GTEST_OUTPUT=f"json:{out}.{rank}.json")
        if check.ranks > 1:
            own.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(check.ranks),
                       LOCAL_WORLD_SIZE=str(check.ranks), MASTER_ADDR="localhost", MASTER_PORT=port)
        if check.least_gpus < check.ranks:
            own["CUDA_VISIBLE_DEVICES"] = own.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        with open(f"{out}.{rank}.txt", "w") as text:
            processes.append(subprocess.Popen([str(HERE / check.program), *check.arguments],
                                              env=own, stdout=text, stderr=subprocess.STDOUT))
    return processes


def wait(processes, deadline):
    """Their exit statuses; those that are too late are ended, and have None."""
    statuses = []
    for process in processes:
        try:
            statuses.append(process.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            statuses.append(None)
    return statuses


def of_tests(report):
    """'19 passed' or '18 passed, 1 failed: Suite.Name', of a report of GoogleTest."""
    passed, failed, skipped = 0, [], 0
    for suite in report["testsuites"]:
        for test in suite["testsuite"]:
            if test.get("result") == "SKIPPED":
                skipped += 1
            elif test.get("failures"):
                failed.append(f"{suite['name']}.{test['name']}")
            else:
                passed += 1
    text = f"{passed} passed"
    if skipped:
        text += f", {skipped} skipped"
    if failed:
        text += f", {len(failed)} failed: " + ", ".join(failed)
    return text, not failed and passed > 0


def of_bench(output):
    """The rows of the lines 'name<TAB>value<TAB>unit'."""
    fields = [line.split("\t") for line in output.splitlines()]
    return [(name, f"{value} {unit}") for name, value, unit in (f for f in fields if len(f) == 3)]


def rows_of(check, statuses, out, seconds):
    """Rows of the table (what, result, seconds), and whether all is well."""
    if None in statuses:
        return [(check.name, f"not done in time, see {out.name}.*.txt", seconds)], False
    if check.kind == "bench":
        rows = [(name, value, "") for name, value in of_bench(
            pathlib.Path(f"{out}.0.txt").read_text())]
        if any(statuses) or not rows:
            rows.append((check.name, f"exit status {statuses[0]}, see {out.name}.0.txt", seconds))
        return rows, bool(rows) and not any(statuses)
    report = pathlib.Path(f"{out}.0.json")
    if not report.exists():
        return [(check.name, f"exit status {statuses[0]}, see {out.name}.0.txt", seconds)], False
    text, well = of_tests(json.loads(report.read_text()))
    if any(statuses):
        text += f" (exit statuses {', '.join(map(str, statuses))}, see {out.name}.*.txt)"
    return [(check.name, text, seconds)], well and not any(statuses)


def table(machine, rows):
    """In Markdown."""
    lines = [machine, "", "| what | result | seconds |", "|---|---|---|"]
    lines += [f"| {what} | {result} | {taken} |" for what, result, taken in rows]
    return "\n".join(lines) + "\n"


def environment_of(torch_folder):
    """Where the programs find the libraries of torch's wheel, and those of the bundle."""
    site = pathlib.Path(torch_folder).parent
    folders = [pathlib.Path(torch_folder) / "lib", *sorted(site.glob("nvidia/*/lib")), HERE / "lib"]
    return dict(os.environ, LD_LIBRARY_PATH=":".join(map(str, folders)), OMP_NUM_THREADS="1")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=570, help="for all together")
    seconds = parser.parse_args().seconds
    import torch
    gpus = torch.cuda.device_count()
    if gpus == 0:
        sys.exit("run: torch finds no GPU on this machine")
    machine = (f"{gpus} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}, "
               f"CUDA {torch.version.cuda}")
    environment = environment_of(os.path.dirname(torch.__file__))
    deadline = time.monotonic() + seconds
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    for old in results.iterdir():
        old.unlink()
    rows, well = [], True
    for number, check in enumerate(checks(gpus)):
        begin = time.monotonic()
        out = results / f"{number}_{check.program}"
        statuses = wait(start(check, environment, out), deadline)
        of_check, passed = rows_of(check, statuses, out, f"{time.monotonic() - begin:.0f}")
        for row in of_check:
            print(*row, sep=": ", flush=True)
        rows += of_check
        well &= passed
    text = table(machine, rows)
    (HERE / "table.md").write_text(text)
    print("\n" + text)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
