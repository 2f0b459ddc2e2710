#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What tools/gpu_run.py makes of results, and how it runs programs: made-up ones."""
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

spec = importlib.util.spec_from_file_location("gpu_run", sys.argv.pop(1))
gpu_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_run)
SMALL_BENCH = sys.argv.pop(1)


def report(**results):
    """As GoogleTest writes it."""
    tests = []
    for name, result in results.items():
        test = {"name": name, "result": "SKIPPED" if result == "skipped" else "COMPLETED"}
        if result == "failed":
            test["failures"] = [{"failure": "1 is not 2"}]
        tests.append(test)
    return {"testsuites": [{"name": "Suite", "testsuite": tests}]}


class Results(unittest.TestCase):
    def test_counts_tests(self):
        self.assertEqual(gpu_run.of_tests(report(a="", b="")), ("2 passed", True))
        self.assertEqual(gpu_run.of_tests(report(a="", b="failed", c="skipped")),
                         ("1 passed, 1 skipped, 1 failed: Suite.b", False))

    def test_nothing_that_passed_is_a_failure(self):
        self.assertEqual(gpu_run.of_tests(report(a="skipped")), ("0 passed, 1 skipped", False))

    def test_takes_the_lines_of_a_bench(self):
        self.assertEqual(gpu_run.of_bench("[smp] a line\nGPT, 1 rank\t1200\ttokens/s\n"),
                         [("GPT, 1 rank", "1200 tokens/s")])

    def test_table(self):
        text = gpu_run.table("1 x H", [("parity", "2 passed", "7"), ("GPT", "12 tokens/s", "")])
        self.assertEqual(text, "1 x H\n\n| what | result | seconds |\n|---|---|---|\n"
                               "| parity | 2 passed | 7 |\n| GPT | 12 tokens/s |  |\n")

    def test_checks_by_number_of_gpus(self):
        names = [check.name for check in gpu_run.checks(1)]
        self.assertEqual(len(names), 5)
        self.assertEqual([c.name for c in gpu_run.checks(2) if c.name not in names],
                         ["two processes, two GPUs, NCCL"])


class Programs(unittest.TestCase):
    """Shell scripts in place of the bundle's programs."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        gpu_run.HERE = pathlib.Path(folder.name)
        self.out = gpu_run.HERE / "out"

    def rows(self, check, script, seconds=600):
        program = gpu_run.HERE / check.program
        program.write_text("#!/bin/sh\n" + script)
        program.chmod(0o755)
        statuses = gpu_run.wait(gpu_run.start(check, {"PATH": "/usr/bin:/bin"}, self.out),
                                time.monotonic() + seconds)
        rows, well = gpu_run.rows_of(check, statuses, self.out, "1")
        return [row[:2] for row in rows], well

    def test_a_job_has_the_variables_of_torchrun_and_one_gpu(self):
        check = gpu_run.Check("job", "job", ranks=2)
        self.rows(check, "echo $RANK $WORLD_SIZE $LOCAL_RANK $CUDA_VISIBLE_DEVICES")
        texts = [pathlib.Path(f"{self.out}.{rank}.txt").read_text() for rank in (0, 1)]
        self.assertEqual(texts, ["0 2 0 0\n", "1 2 1 0\n"])

    def test_a_job_of_several_gpus_sees_all(self):
        check = gpu_run.Check("job", "job", ranks=2, least_gpus=2)
        self.rows(check, "echo ${CUDA_VISIBLE_DEVICES-all}")
        self.assertEqual(pathlib.Path(f"{self.out}.1.txt").read_text(), "all\n")

    def test_tests_that_do_not_start(self):
        self.assertEqual(self.rows(gpu_run.Check("tests", "tests"), "exit 127"),
                         ([("tests", "exit status 127, see out.0.txt")], False))

    def test_a_rank_that_fails(self):
        script = ("""echo '{"testsuites": [{"name": "S", "testsuite": [{"name": "a"}]}]}' """
                  """> ${GTEST_OUTPUT#json:}\nexit $RANK""")
        self.assertEqual(self.rows(gpu_run.Check("tests", "tests", ranks=2), script),
                         ([("tests", "1 passed (exit statuses 0, 1, see out.*.txt)")], False))

    def test_what_takes_too_long_is_ended(self):
        self.assertEqual(self.rows(gpu_run.Check("slow", "slow"), "exec sleep 3600", seconds=0),
                         ([("slow", "not done in time, see out.*.txt")], False))

    def test_a_bench(self):
        check = gpu_run.Check("bench", "bench", kind="bench")
        self.assertEqual(self.rows(check, "printf 'GPT\\t12\\ttokens/s\\n'"),
                         ([("GPT", "12 tokens/s")], True))
        self.assertEqual(self.rows(check, "exit 3"),
                         ([("bench", "exit status 3, see out.0.txt")], False))


class Bench(unittest.TestCase):
    def test_its_lines(self):
        output = subprocess.run([SMALL_BENCH, "--small"], check=True, capture_output=True,
                                text=True).stdout
        self.assertEqual([name for name, _ in gpu_run.of_bench(output)], [
            "GPT, plain libtorch", "GPT, 1 rank",
            "GPT, 1 rank, time of a step over plain libtorch's",
            "GPT, 2 stages", "GPT, 2 stages, time of a step over plain libtorch's",
            "all_reduce of 64 KiB, 2 ranks, exact", "all_reduce of 64 KiB, 2 ranks, fast"])


if __name__ == "__main__":
    unittest.main()
