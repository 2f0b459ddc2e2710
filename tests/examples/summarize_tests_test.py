#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs tools/summarize_tests.py on made-up runs and compares its output with counts by hand."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path("tools/summarize_tests.py").resolve()

GTEST = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="9" timestamp="2026-01-01T00:00:00" name="AllTests">
  <testsuite name="Suite">{cases}</testsuite>
</testsuites>"""
PASSED = '<testcase name="good" status="run" result="completed" classname="Suite" />'
FAILED = '<testcase name="bad" status="run" classname="Suite"><failure message="x"/></testcase>'
SKIPPED = '<testcase name="none" status="run" classname="Suite"><skipped message="x"/></testcase>'
DISABLED = '<testcase name="off" status="notrun" result="suppressed" classname="Suite" />'
# The report that Bazel writes for a program that wrote none itself.
MADE_UP = """<testsuites><testsuite name="shell" tests="1" failures="0" errors="1">
  <testcase name="shell" status="run"><error message="exited"></error></testcase>
</testsuite></testsuites>"""


class Run:
    """A made-up Bazel run: a folder with an event file and XML reports."""

    def __init__(self, folder, name="events"):
        self.folder = Path(folder)
        self.name = name
        self.events = []

    def target(self, label, reports, status="PASSED", built=True, milliseconds=None):
        """Adds a test target with the text of the test.xml of each shard (None: it wrote none)."""
        self.add({"targetConfigured": {"label": label}}, configured={"testSize": "SMALL"})
        self.add({"targetCompleted": {"label": label}}, completed={"success": True} if built else {})
        if not built:
            return
        for shard, report in enumerate(reports, start=1):
            # A space in the path is quoted in the event's URI.
            path = self.folder / f"{self.name} {label[2:].replace(':', ' ')} {shard}.xml"
            if report is not None:
                path.write_text(report)
            self.add(
                {"testResult": {"label": label, "run": 1, "shard": shard, "attempt": 1}},
                testResult={"testActionOutput": [{"name": "test.xml", "uri": path.as_uri()}]},
            )
        summary = {"overallStatus": status}
        if milliseconds is not None:
            summary["totalRunDurationMillis"] = str(milliseconds)  # Bazel writes int64 as text
        self.add({"testSummary": {"label": label}}, testSummary=summary)

    def library(self, label):
        """Adds a target that is no test and did not build."""
        self.add({"targetConfigured": {"label": label}}, configured={"targetKind": "cc_library"})
        self.add({"targetCompleted": {"label": label}}, completed={})

    def add(self, event_id, **payload):
        self.events.append({"id": event_id, **payload})

    def ended(self, bazel_status=0):
        """Adds the end of the run; returns its event file."""
        exit_code = {"code": bazel_status} if bazel_status else {}  # the form that Bazel writes
        self.add({"buildFinished": {}}, finished={"exitCode": exit_code})
        return self.written()

    def written(self):
        path = self.folder / f"{self.name}.json"
        path.write_text("".join(json.dumps(event) + "\n" for event in self.events))
        return path

    def summary(self, bazel_status=0):
        return summary(self.ended(bazel_status))


def summary(*events):
    """The exit status of the script and the lines that it printed."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, events)],
        check=False, capture_output=True, text=True,
    )
    return done.returncode, done.stdout.splitlines()


class SummarizeTests(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.run_ = Run(self.folder)

    def test_counts_cases_over_targets_and_shards(self):
        self.run_.target("//a:x", [GTEST.format(cases=PASSED * 3)])
        self.run_.target("//b:y", [GTEST.format(cases=PASSED), GTEST.format(cases=PASSED)])
        self.assertEqual(self.run_.summary(), (0, ["5 passed, 0 failed"]))

    def test_counts_skipped_and_disabled_cases(self):
        self.run_.target("//a:x", [GTEST.format(cases=PASSED + SKIPPED + DISABLED)])
        self.assertEqual(self.run_.summary(), (0, ["1 passed, 0 failed, 2 skipped"]))

    def test_names_failed_cases(self):
        self.run_.target("//a:x", [GTEST.format(cases=PASSED + FAILED)], status="FAILED")
        self.assertEqual(
            self.run_.summary(bazel_status=3),
            (1, ["FAILED //a:x: Suite.bad", "1 passed, 1 failed"]),
        )

    def test_failed_target_without_failed_case_is_one_failure(self):
        self.run_.target("//a:crash", [None], status="FAILED")
        self.run_.target("//a:made_up", [MADE_UP], status="FAILED")
        self.run_.target("//a:nobuild", [], built=False)
        self.run_.target("//a:partial", [GTEST.format(cases=PASSED), None], status="TIMEOUT")
        self.assertEqual(
            self.run_.summary(bazel_status=1),
            (
                1,
                [
                    "FAILED //a:crash: FAILED",
                    "FAILED //a:made_up: FAILED",
                    "FAILED //a:nobuild: failed to build",
                    "FAILED //a:partial: TIMEOUT",
                    "1 passed, 4 failed",
                ],
            ),
        )

    def test_program_without_gtest_is_one_case(self):
        self.run_.target("//a:shell", [MADE_UP.replace('<error message="exited"></error>', "")])
        self.assertEqual(self.run_.summary(), (0, ["1 passed, 0 failed"]))

    def test_broken_library_is_a_failure(self):
        self.run_.target("//a:x", [GTEST.format(cases=PASSED)])
        self.run_.library("//a:lib")
        self.assertEqual(
            self.run_.summary(bazel_status=1),
            (1, ["FAILED bazel test: exit status 1, see above", "1 passed, 1 failed"]),
        )

    def test_prints_the_twenty_slowest_targets_before_the_counts(self):
        for i in range(25):
            self.run_.target(f"//a:{i:02}", [GTEST.format(cases=PASSED)], milliseconds=1000 * i)
        self.run_.target("//a:slow", [GTEST.format(cases=FAILED)], "FAILED", milliseconds=123456)
        self.run_.target("//a:as_slow_as_24", [GTEST.format(cases=PASSED)], milliseconds=24000)
        status, lines = self.run_.summary(bazel_status=3)
        self.assertEqual(status, 1)
        self.assertEqual(
            lines,
            [
                "The slowest 20 of 27 test targets:",
                "   123.5 s  //a:slow",
                "    24.0 s  //a:24",
                "    24.0 s  //a:as_slow_as_24",
            ]
            + [f"{i:8.1f} s  //a:{i:02}" for i in range(23, 6, -1)]
            + ["FAILED //a:slow: Suite.bad", "26 passed, 1 failed"],
        )

    def test_no_test_is_a_failure(self):
        self.assertEqual(self.run_.summary(), (1, ["FAILED no test ran", "0 passed, 1 failed"]))

    def test_run_that_did_not_end_is_a_failure(self):
        self.run_.target("//a:x", [GTEST.format(cases=PASSED)])
        self.assertEqual(
            summary(self.run_.written()),
            (1, ["FAILED bazel test: did not end, see above", "1 passed, 1 failed"]),
        )

    def test_adds_several_runs_and_names_them(self):
        self.run_.target("//a:x", [GTEST.format(cases=PASSED + SKIPPED)], milliseconds=2000)
        asan = Run(self.folder, "asan")
        asan.target("//a:x", [GTEST.format(cases=FAILED)], "FAILED", milliseconds=3000)
        missing = f"{self.folder}/tsan.json"
        self.assertEqual(
            summary(self.run_.ended(), asan.ended(3), missing),
            (
                1,
                [
                    "The slowest 2 of 2 test targets:",
                    "     3.0 s  asan: //a:x",
                    "     2.0 s  events: //a:x",
                    "FAILED asan: //a:x: Suite.bad",
                    "FAILED tsan: bazel test: did not end, see above",
                    "1 passed, 2 failed, 1 skipped",
                ],
            ),
        )

    def test_one_run_without_tests_fails_all(self):
        self.run_.target("//a:x", [GTEST.format(cases=PASSED)])
        empty = Run(self.folder, "asan")
        self.assertEqual(
            summary(self.run_.ended(), empty.ended()),
            (1, ["FAILED asan: no test ran", "1 passed, 1 failed"]),
        )


if __name__ == "__main__":
    unittest.main()
