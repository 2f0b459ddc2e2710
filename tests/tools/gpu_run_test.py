#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How tools/gpu_run.py runs programs and reads their output, with made-up ones."""
import gzip
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

SCRIPT = sys.argv.pop(1)
SMALL_BENCH = sys.argv.pop(1)
COUNT_CALLS = sys.argv.pop(1)
COUNTED_PROGRAM = sys.argv.pop(1)
CRASH_STACK = sys.argv.pop(1)
sys.path.insert(0, os.path.dirname(SCRIPT))
import gpu_report  # noqa: E402
import gpu_run  # noqa: E402

OUTPUT = b"""Running main() from gtest_main.cc
[ RUN      ] S.good
[       OK ] S.good (12 ms)
[ RUN      ] L/P.Bad/7
a.cc:3: Failure
[  FAILED  ] L/P.Bad/7, where GetParam() = 1 stages x 2 replicas, graphs (3 ms)
[ RUN      ] S.left_out
[  SKIPPED ] S.left_out (0 ms)
[ RUN      ] S.slow
"""
END = b"""[  PASSED  ] 1 test.
[  FAILED  ] 2 tests, listed below:
[  FAILED  ] L/P.Bad/7, where GetParam() = 1 stages x 2 replicas, graphs
"""
LISTING = """Running main() from gtest_main.cc
S.
  a
  b
L/P.
  Equal/0  # GetParam() = 1 stages
  Equal/1  # GetParam() = 1 stages, graphs
  Equal/2  # GetParam() = 2 stages, again in graphs
"""
# A program of the bundle that is one of GoogleTest's.
PASSES = """case "$*" in *--gtest_list_tests*) echo S.; echo "  a"; exit;; esac
echo '[ RUN      ] S.a'
echo '[       OK ] S.a (1 ms)'
"""


def outcome(kind, output, statuses=(0,)):
    return gpu_run.Outcome(gpu_run.Check("it", ["it"], 1, kind), list(statuses), [output], 7)


def wait_for_the_end_of(process):
    """Waits also for one that is no child of this program, and may stay as a zombie."""
    try:
        while ") Z " not in pathlib.Path(f"/proc/{process}/stat").read_text():
            time.sleep(0.01)
    except (FileNotFoundError, ProcessLookupError):
        pass


class Results(unittest.TestCase):
    def test_counts_tests_of_a_program_that_was_killed(self):
        text = ("1 passed, 1 skipped, 1 failed: L/P.Bad/7, not ended: S.slow")
        self.assertEqual(gpu_report.rows_of(outcome("tests", OUTPUT, [None])),
                         ([("it", text + " (hung)", "7")], False))
        self.assertEqual(str(gpu_report.Tests([OUTPUT + END])), text)

    def test_nothing_that_passed_is_a_failure(self):
        self.assertEqual(gpu_report.rows_of(outcome("tests", b"[  SKIPPED ] S.a (0 ms)\n")),
                         ([("it", "0 passed, 1 skipped", "7")], False))
        self.assertEqual(gpu_report.rows_of(outcome("tests", b"")),
                         ([("it", "0 passed", "7")], False))

    def test_a_failure_that_no_test_has(self):
        output = b"[ RUN      ] S.a\n[       OK ] S.a (1 ms)\n"
        self.assertEqual(gpu_report.rows_of(outcome("tests", output, [0, 3])),
                         ([("it", "1 passed (rank 1: exit status 3)", "7")], False))

    def test_takes_the_lines_of_a_bench_and_of_tests(self):
        line = b"[smp] a line\nGPT, 1 rank\t1200\ttokens/s\n"
        row = ("GPT, 1 rank", "1200 tokens/s", "")
        self.assertEqual(gpu_report.rows_of(outcome("bench", line)), ([row], True))
        self.assertEqual(gpu_report.rows_of(outcome("bench", line, [-9])),
                         ([row, ("it", "signal 9", "7")], False))
        self.assertEqual(gpu_report.rows_of(outcome("bench", b"")),
                         ([("it", "no values", "7")], False))
        passes = b"[ RUN      ] S.a\n" + line + b"[       OK ] S.a (1 ms)\n"
        self.assertEqual(gpu_report.rows_of(outcome("tests", passes)),
                         ([("it", "1 passed", "7"), row], True))

    def test_programs_and_quick_checks(self):
        self.assertEqual(gpu_report.rows_of(outcome("program", b"")),
                         ([("it", "passed", "7")], True))
        self.assertEqual(gpu_report.rows_of(outcome("program", b"", [1])),
                         ([("it", "exit status 1", "7")], False))
        self.assertEqual(gpu_report.rows_of(outcome("quick", b"a")), ([], True))
        self.assertEqual(gpu_report.rows_of(outcome("quick", b"a", [None])),
                         ([("it", "hung", "7")], False))
        self.assertEqual(gpu_report.rows_of(outcome("quick", b"", [])),
                         ([("it", "no time was left", "7")], False))
        self.assertEqual(gpu_report.rows_of(outcome("lines", b"H, 580\nH, 580\n")),
                         ([("it", "H, 580", ""), ("it", "H, 580", "")], True))

    def test_libraries_that_are_not_found(self):
        found = b"\tliba.so => /lib/liba.so (0x1)\n"
        self.assertEqual(gpu_report.rows_of(outcome("libraries", found)), ([], True))
        self.assertEqual(gpu_report.rows_of(outcome("libraries", b"\tliba.so => not found\n")),
                         ([("it", "liba.so => not found", "7")], False))

    def test_table(self):
        text = gpu_report.table("1 x H", [("parity", "2 passed", "7"), ("a|b", "12 tokens/s", "")])
        self.assertEqual(text, "1 x H\n\n| what | result | seconds |\n|---|---|---|\n"
                               "| parity | 2 passed | 7 |\n| a\\|b | 12 tokens/s |  |\n")

    def test_calls_a_step(self):
        rows = gpu_run.calls_a_step("GPT", {"cudaLaunchKernel": 100, "cudaMemcpy": 1},
                                    {"cudaLaunchKernel": 150, "__cudaLaunchKernel": 5,
                                     "cuLaunchKernel": 20, "cudaMemcpy": 1,
                                     "cudaStreamSynchronize": 10})
        self.assertEqual([row[:2] for row in rows], [
            ("GPT: launches a step", "7.5"), ("GPT: launches of graphs a step", "0"),
            ("GPT: waits of the host a step", "1"), ("GPT: copies a step", "0"),
            ("GPT: cudaMalloc a step", "0")])

    def test_reads_what_count_calls_prints(self):
        output = b"[smp] a line\ncount_calls cudaMalloc 12\ncount_calls __cudaLaunchKernel 3\n"
        self.assertEqual(gpu_run.calls_of(outcome("quick", output)),
                         {"cudaMalloc": 12, "__cudaLaunchKernel": 3})

    def test_calls_are_those_of_all_ranks(self):
        ended = gpu_run.Outcome(gpu_run.Check("it", ["it"], 1, "quick", ranks=2), [0, 0], [
            b"count_calls cudaMalloc 12\n", b"count_calls cudaMalloc 3\ncount_calls cudaFree 1\n"])
        self.assertEqual(gpu_run.calls_of(ended), {"cudaMalloc": 15, "cudaFree": 1})

    def test_each_group_has_its_part_of_the_time_that_is_left(self):
        """And what one leaves over goes to those behind it."""
        now, deadlines = 0, []

        class Groups(gpu_run.Run):
            def machine(self):
                return 1

            def find(self, _):
                nonlocal now
                deadlines.append(self.deadline)
                now += 40

            def speed(self, _):
                nonlocal now
                deadlines.append(self.deadline)
                now = self.deadline

            def deep(self, _):
                deadlines.append(self.deadline)

        with unittest.mock.patch("gpu_run.time.monotonic", lambda: now):
            Groups(None, None, ["deep", "speed", "find"], 300)()
        self.assertEqual(deadlines, [100, 170, 300])


class Bundles(unittest.TestCase):
    """A folder with shell scripts in place of the bundle's programs, and a torch of two lines."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.here, self.tools = self.folder / "bundle", self.folder / "bin"
        for name in ("bundle/lib", "bin", "work", "site/torch", "site/nvidia/cu13/lib"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "site/torch/__init__.py").write_text(
            "class cuda:\n    device_count = staticmethod(lambda: 1)\n"
            "    get_device_name = staticmethod(lambda index: 'made up')\n"
            "class version:\n    cuda = '13.0'\n__version__ = '2.11.0'\n")
        self.tool("cuda-gdb", 'echo "stacks of process $4"')
        shutil.copy(CRASH_STACK, self.here / "crash_stack.so")

    def tool(self, name, script):
        (self.tools / name).write_text("#!/bin/sh\n" + script)
        (self.tools / name).chmod(0o755)

    def pack(self, name, script):
        with gzip.open(self.here / f"{name}.gz", "wb") as file:
            file.write(b"#!/bin/sh\n" + script.encode())


class Programs(Bundles):
    def setUp(self):
        super().setUp()
        changed = {"HERE": self.here, "LEAST": 0, "GRACE": 0.1}
        before = {name: getattr(gpu_run, name) for name in changed}
        for name, value in changed.items():
            setattr(gpu_run, name, value)
            self.addCleanup(setattr, gpu_run, name, before[name])
        sys.path.insert(0, str(self.folder / "site"))
        self.addCleanup(sys.path.remove, str(self.folder / "site"))
        path = os.environ["PATH"]
        os.environ["PATH"] = f"{self.tools}:{path}"
        self.addCleanup(os.environ.__setitem__, "PATH", path)

    def run_script(self, script, limit=600, **options):
        self.pack("it", script)
        bundle = gpu_run.Bundle(self.folder / "work")
        check = gpu_run.Check("it", [bundle.work / "it"], limit, **options)
        return bundle.run(check, time.monotonic() + 600)

    def test_a_job_has_the_variables_of_torchrun_and_one_gpu(self):
        ended = self.run_script("echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR "
                                "$CUDA_VISIBLE_DEVICES; [ $MASTER_PORT -gt 0 ]", ranks=2)
        self.assertEqual(ended.outputs, [b"0 2 0 2 127.0.0.1 0\n", b"1 2 1 2 127.0.0.1 0\n"])
        self.assertEqual(ended.statuses, [0, 0])

    def test_a_job_of_several_gpus_sees_all(self):
        ended = self.run_script("echo ${CUDA_VISIBLE_DEVICES-all}", ranks=2, least_gpus=2)
        self.assertEqual(ended.outputs, [b"all\n", b"all\n"])

    def test_libraries_are_for_programs_that_are_linked_with_them(self):
        script = "echo $LD_LIBRARY_PATH"
        self.assertEqual(self.run_script(script).outputs[0].decode(), ":".join(
            str(self.folder / name) for name in ("site/torch/lib", "site/nvidia/cu13/lib",
                                                 "bundle/lib")) + "\n")
        inherited = os.environ.get("LD_LIBRARY_PATH", "") + "\n"
        self.assertEqual(self.run_script(script, native=False).outputs[0].decode(), inherited)

    def test_a_hang_costs_its_own_limit_and_leaves_stacks(self):
        ended = self.run_script("exec sleep 3600", limit=0.1)
        self.assertEqual(ended.statuses, [None])
        self.assertRegex(ended.stacks.decode(), r"(?s)stacks of rank 0.*stacks of process \d+\n.*"
                                                r"process \d+ thread \d+ ")

    def test_where_the_debugger_hangs_the_kernel_tells_of_the_threads(self):
        self.tool("cuda-gdb", "exec sleep 3600")
        before = gpu_run.STACKS
        gpu_run.STACKS = 0.1
        self.addCleanup(setattr, gpu_run, "STACKS", before)
        text = self.run_script("exec sleep 3600", limit=0.1).stacks.decode()
        self.assertRegex(text, r"(?s)cuda-gdb: hung\nprocess \d+ thread \d+ ")

    def test_a_kernel_that_does_not_tell_is_quoted(self):
        self.assertEqual(gpu_run.line_of(self.folder / "none"), "No such file or directory")

    def test_a_crash_leaves_its_stack(self):
        for fault, number in (("SEGV", -11), ("ABRT", -6)):
            ended = self.run_script(f"kill -{fault} $$")
            self.assertEqual(ended.statuses, [number])
            self.assertRegex(ended.outputs[0].decode(), r"(?s)^crash_stack:\n.*libc\.so\.6\(.*\n")

    def test_a_crash_of_python_leaves_its_stack(self):
        bundle = gpu_run.Bundle(self.folder / "work")
        command = [sys.executable, "-c", "import os; os.abort()"]
        ended = bundle.run(gpu_run.Check("it", command, 600, native=False), time.monotonic() + 600)
        self.assertEqual(ended.statuses, [-6])
        self.assertIn("Current thread", ended.outputs[0].decode())

    def test_what_is_preloaded_otherwise_comes_behind_it(self):
        other = os.path.abspath(COUNT_CALLS)
        ended = self.run_script("echo $LD_PRELOAD", environment={"LD_PRELOAD": other})
        self.assertEqual(ended.outputs[0].decode(), f"{self.here}/crash_stack.so:{other}\n")

    def test_what_a_program_has_started_ends_with_it(self):
        ended = self.run_script("sleep 3600 >/dev/null 2>&1 & echo $!")
        wait_for_the_end_of(int(ended.outputs[0]))
        self.assertEqual(ended.statuses, [0])

    def test_when_a_rank_fails_the_others_hang(self):
        ended = self.run_script("[ $RANK = 1 ] && exit 3; exec sleep 3600", ranks=2)
        self.assertEqual(gpu_report.ending(ended.statuses), "rank 0: hung, rank 1: exit status 3")
        self.assertIn("stacks of rank 0", ended.stacks.decode())
        self.assertNotIn("stacks of rank 1", ended.stacks.decode())

    def test_a_program_that_is_not_there(self):
        bundle = gpu_run.Bundle(self.folder / "work")
        ended = bundle.run(gpu_run.Check("it", [bundle.work / "no"], 600, ranks=2),
                           time.monotonic() + 600)
        self.assertEqual(ended.statuses, [127, 127])
        self.assertIn(b"cannot start ", ended.outputs[1])

    def test_without_time_nothing_starts(self):
        gpu_run.LEAST = 2
        bundle = gpu_run.Bundle(self.folder / "work")
        check = gpu_run.Check("it", ["touch", self.folder / "it"], 600)
        ended = bundle.run(check, time.monotonic())
        self.assertEqual(gpu_report.rows_of(ended)[0], [("it", "0 passed (no time was left)", "0")])
        self.assertFalse((self.folder / "it").exists())

    def test_the_log_has_the_end_of_each_output(self):
        ended = self.run_script("echo first; echo last", ranks=2)
        self.assertRegex(ended.log(5).decode(), r"(?s)^\n===== it: ended well, [\d.]+ s: \S+/it\n"
                                                r"--- rank 0\nlast\n--- rank 1\nlast\n$")

    def test_checks_of_parity_by_their_parameters(self):
        bundle = gpu_run.Bundle(self.folder / "work")
        cases = gpu_run.cases_of(LISTING)
        self.assertEqual(list(cases), ["S.a", "S.b", "L/P.Equal/0", "L/P.Equal/1", "L/P.Equal/2"])
        checks = gpu_run.parity_checks(bundle, cases)
        self.assertEqual([(c.name, c.filter, c.environment["GTEST_SHARD_INDEX"]) for c in checks], [
            *((f"parity, operator by operator, {i + 1} of 3", "*-L/P.Equal/1:L/P.Equal/2", str(i))
              for i in range(3)),
            *((f"parity, CUDA graphs, {i + 1} of 2", "L/P.Equal/1:L/P.Equal/2", str(i))
              for i in range(2))])
        self.assertEqual({c.environment["GTEST_TOTAL_SHARDS"] for c in checks[3:]}, {"2"})
        self.assertEqual({c.environment.get("GTEST_REPEAT") for c in checks[:3]}, {None})
        self.assertEqual({c.environment["GTEST_REPEAT"] for c in checks[3:]}, {"5"})

    def test_checks_by_number_of_gpus(self):
        bundle = gpu_run.Bundle(self.folder / "work")
        names = [[check.name for check in gpu_run.find_checks(
            bundle, gpus, {"parity_test": {}, "models_test": {"S.a": "", "S.b": ""}})]
            for gpus in (1, 2)]
        self.assertEqual(set(names[1]) - set(names[0]), {"two processes, two GPUs, NCCL"})
        self.assertIn("parity of models, 2 of 2", names[0])

    def test_losses_that_do_not_fall_are_a_failure(self):
        bundle = gpu_run.Bundle(self.folder / "work")
        for losses, row in ((("0x1p+1", "0x1p+0"), "equal in 6 ways"),
                            (("0x0p+0", "0x0p+0"), "equal in 6 ways, but from 0 to 0"),
                            (("0x1p+1", "nan"), "equal in 6 ways, but from 2 to nan")):
            for name in gpu_run.EXAMPLES:
                (bundle.work / f"{name}.losses").write_text("0 %s\n1 %s\n" % losses)
            self.assertEqual(gpu_run.losses_row(bundle), (
                [("GPT example, losses of 20 steps", row, "")], row == "equal in 6 ways"))

    def test_what_failed_runs_again_with_the_launch_named(self):
        self.pack("it", PASSES)
        bundle = gpu_run.Bundle(self.folder / "work")
        parts = gpu_run.shards("parity", [bundle.work / "it"], 3, 60, range(9))
        alone = gpu_run.Check("alone", [bundle.work / "it", "-x"], 60, kind="program")
        outputs = [OUTPUT, b"[ RUN      ] S.b\n[  FAILED  ] S.b (1 ms)\n",
                   b"[       OK ] S.c (1 ms)"]
        ended = [gpu_run.Outcome(check, [status], [output]) for check, status, output in zip(
            [*parts, alone], [None, 1, 0, 1], [*outputs, b""])]
        program, tests = gpu_run.failed_checks(ended)
        self.assertEqual(tests.arguments(), [
            str(bundle.work / "it"), "--gtest_filter=L/P.Bad/7:S.slow:S.b"])
        blocking = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_SHOW_CPP_STACKTRACES": "1",
                    "SMP_BACKTRACE": "1"}
        self.assertEqual((tests.environment, program.environment), (blocking, blocking))
        self.assertEqual(tests.limit, 45)
        self.assertEqual((program.arguments()[1:], program.kind), (["-x"], "program"))


class Whole(Bundles):
    """`run` itself, in a bundle."""

    def setUp(self):
        super().setUp()
        shutil.copy(SCRIPT, self.here / "run")
        shutil.copy(gpu_report.__file__, self.here)
        for name in gpu_run.TESTS:
            self.pack(name, PASSES)
        self.pack("gpt", """[ -f $4 ] && echo held out
while [ $# -gt 1 ]; do
  [ "$1" = --losses ] && printf '0 0x1p+1\\n1 0x1p+0\\n' >"$2"
  [ "$1" = --steps ] && echo "count_calls cudaMemcpy $(($2 * (${SMP_DEVICE_IPC-1} ? 4 : 8)))" >&2
  shift
done""")
        (self.here / "text.txt").write_text("text")
        self.pack("gpu", """[ "$1" = --count ] || { printf 'GPT\\t12\\ttokens/s\\n'; exit; }
for n in $(seq $2); do :; done; echo "count_calls cudaLaunchKernel $((n * 3 + 7))" >&2""")
        (self.here / "gpu_graphs.py").write_text(r"print('GPT, PyTorch\t13\ttokens/s')")
        self.tool("nvidia-smi", "echo made up, 580")
        self.tool("ldd", "echo 'liba.so => /lib/liba.so'")
        self.tool("compute-sanitizer", 'for last; do :; done; exec "$last"')
        self.out = self.folder / "out"
        self.environment = dict(os.environ, PATH=f"{self.tools}:{os.environ['PATH']}",
                                PYTHONPATH=str(self.folder / "site"), OUT=str(self.out),
                                TMPDIR=str(self.folder / "work"))

    def start(self, *arguments):
        process = subprocess.Popen([sys.executable, self.here / "run", *arguments],
                                   env=self.environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True)
        self.addCleanup(process.wait)
        self.addCleanup(process.stdout.close)
        return process

    def table(self):
        return (self.out / "table.md").read_text()

    def test_all_groups(self):
        process = self.start()
        printed = process.communicate()[0]
        self.assertEqual(process.returncode, 0, printed)
        table = self.table()
        self.assertTrue(table.startswith("1 x made up, torch 2.11.0, CUDA 13.0\n"), table)
        for row in ("| parity, 1 of 1 | 1 passed |", "| parity of models, 1 of 1 | 1 passed |",
                    "| two processes on one GPU | 1 passed |",
                    "| GPT example, two processes | passed |", "| GPT | 12 tokens/s |  |",
                    "| GPT example, losses of 20 steps | equal in 6 ways |  |",
                    "| GPT, PyTorch | 13 tokens/s |  |",
                    "| GPT, 1 rank, CUDA graphs: launches a step | 3 |  |",
                    "| GPT example, two processes: waits of the host a step | 8 |  |",
                    "| GPT example, two processes, through host memory: waits of the host a step "
                    "| 16 |  |",
                    "| memcheck of cuda_test | 1 passed |"):
            self.assertIn(row, table)
        self.assertIn("GPT, PyTorch: 13 tokens/s", printed)
        self.assertIn("held out", (self.out / "log.txt").read_text())
        self.assertEqual({path.name for path in self.out.iterdir()}, {"table.md", "log.txt"})
        self.assertFalse((self.here / "results").exists())

    def test_layouts_with_other_losses_are_a_failure(self):
        self.pack("gpt", """case "$*" in *replicas*) loss=0x1p+1;; *resumed*) exit;; *) loss=0x1p+0; esac
while [ $# -gt 1 ]; do [ "$1" = --losses ] && echo 0 $loss >"$2"; shift; done""")
        process = self.start("--only", "find")
        process.communicate()
        self.assertEqual(process.returncode, 1)
        self.assertIn("| GPT example, losses of 20 steps | other bits or none: GPT example, stopped and "
                      "resumed, GPT example, two replicas |", self.table())

    def test_a_failure_is_tried_again_and_remains_one(self):
        self.pack("cuda_test", """case "$*" in *--gtest_list_tests*) exit;; esac
echo "[  FAILED  ] S.bad (1 ms)"; echo "with $* $CUDA_LAUNCH_BLOCKING"; exit 1""")
        process = self.start("--only", "find")
        process.communicate()
        self.assertEqual(process.returncode, 1)
        self.assertIn("| again, blocking launches: random numbers, messages, collectives, NCCL | "
                      "0 passed, 1 failed: S.bad (exit status 1) |", self.table())
        self.assertIn("with --gtest_filter=S.bad 1\n", (self.out / "log.txt").read_text())

    def test_calls_that_are_not_counted_are_a_failure(self):
        self.pack("gpu", "exit 0")
        process = self.start("--only", "deep")
        process.communicate()
        self.assertEqual(process.returncode, 1)
        self.assertIn("| GPT, 2 stages: calls a step | not counted |", self.table())

    def test_without_a_gpu(self):
        (self.folder / "site/torch/__init__.py").write_text(
            "class cuda:\n    device_count = staticmethod(lambda: 0)\n"
            "class version:\n    cuda = None\n__version__ = '2.11.0'\n")
        process = self.start()
        self.assertEqual(process.communicate()[0], "torch: finds no GPU on this machine\n")
        self.assertEqual(process.returncode, 1)

    def test_without_torch(self):
        shutil.rmtree(self.folder / "site/torch")
        process = subprocess.run([sys.executable, "-S", self.here / "run"], env=self.environment,
                                 capture_output=True, text=True)
        self.assertEqual((process.returncode, process.stderr), (1, "run: python3 has no torch\n"))

    def test_a_group_that_there_is_not(self):
        process = self.start("--only", "find,fast")
        printed = process.communicate()[0]
        self.assertIn("expected some of find, speed, deep, got 'find,fast'", printed)
        self.assertEqual(process.returncode, 2)

    def start_and_wait_for_the_second_bench(self):
        """Returns `run` and the process that is under way."""
        begun = self.folder / "begun"
        (self.here / "gpu_graphs.py").write_text(
            "import os, pathlib, time\n"
            f"pathlib.Path({str(begun)!r} + '.new').write_text(str(os.getpid()))\n"
            f"os.rename({str(begun)!r} + '.new', {str(begun)!r})\ntime.sleep(3600)\n")
        process = self.start("--only", "speed")
        while not begun.exists():
            self.assertIsNone(process.poll(), "run has ended")
            time.sleep(0.01)
        return process, int(begun.read_text())

    def test_a_kill_loses_only_what_is_under_way(self):
        process, child = self.start_and_wait_for_the_second_bench()
        process.kill()
        process.wait()
        os.killpg(child, signal.SIGKILL)
        self.assertIn("| GPT | 12 tokens/s |  |", self.table())
        self.assertIn("speed and memory: ended well", (self.out / "log.txt").read_text())

    def test_a_request_to_end_ends_what_is_under_way(self):
        process, child = self.start_and_wait_for_the_second_bench()
        process.terminate()
        self.assertEqual(process.wait(), 128 + signal.SIGTERM)
        wait_for_the_end_of(child)
        self.assertIn("| GPT | 12 tokens/s |  |", self.table())


class Bench(unittest.TestCase):
    def test_its_lines(self):
        output = subprocess.run([SMALL_BENCH, "--small"], check=True, capture_output=True).stdout
        self.assertEqual([name for name, _, _ in gpu_report.values_of([output])], [
            "GPT, plain libtorch", "GPT, 1 rank",
            "GPT, 1 rank, time of a step over plain libtorch's",
            "GPT, 2 stages", "GPT, 2 stages, time of a step over plain libtorch's",
            "all_reduce of 64 KiB, 2 ranks, exact", "all_reduce of 64 KiB, 2 ranks, fast"])

    def test_launches_are_counted_by_whichever_way_a_program_comes_to_them(self):
        """One through the runtime, which goes on to the driver, and two to the driver alone."""
        ended = subprocess.run([COUNTED_PROGRAM], capture_output=True, text=True, check=True,
                               env=dict(os.environ, LD_PRELOAD=os.path.abspath(COUNT_CALLS)))
        self.assertEqual(ended.stdout, "3 launches, 0 failures\n")
        self.assertEqual(gpu_run.calls_of(outcome("quick", ended.stderr.encode())),
                         {"cudaLaunchKernel": 1, "cuLaunchKernel": 2, "cuStreamSynchronize": 1})

    def test_steps_to_count_calls_in(self):
        for way in gpu_run.WAYS:
            if not way.endswith("g"):  # the CPU has no graphs
                output = subprocess.run([SMALL_BENCH, "--small", "--count", "2", way], check=True,
                                        capture_output=True).stdout
                self.assertEqual(gpu_report.values_of([output]), [])


if __name__ == "__main__":
    unittest.main()
