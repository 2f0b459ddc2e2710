#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts GoogleTest cases over all test targets of Bazel runs.

Reads the build event file of each run (bazel test --build_event_json_file=FILE), so that logs of
earlier runs are not counted, and the test.xml of every shard. A target that failed without a failed
case (it did not build, crashed, or ran out of time) counts as one failure and is named; so does a
run that failed without a failed target, that was not ended, or in which no test ran. A test without
GoogleTest's XML (a shell test) counts as one case. Prints the slowest targets with their seconds
(those of the first run, where Bazel took the result from its cache), then what failed, each with the
name of its file if there are several. The last line is "N passed, N failed", with ", N skipped" if
any were. Exits non-zero if anything failed.
"""

import argparse
import json
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

SLOWEST = 20  # targets that are printed


@dataclass
class Target:
    """One test target of the run."""

    label: str
    ok: bool = False
    status: str = "did not run"
    seconds: float = 0  # seconds of all shards and attempts together
    logs: dict = field(default_factory=dict)  # (run, shard) -> path of the last attempt's test.xml


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    messages: list = field(default_factory=list)

    def fail(self, message):
        self.failed += 1
        self.messages.append(message)


def read_events(path):
    """The events of a build event file, which has one JSON object a line; none if it is missing."""
    try:
        with open(path, encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]
    except FileNotFoundError:
        return []


def collect_targets(events, name):
    """The test targets that the run `name` wanted, by label, with their results."""
    targets = {}

    def target(event_id):
        return targets.setdefault(event_id["label"], Target(name + event_id["label"]))

    for event in events:
        event_id = event.get("id", {})
        if "targetConfigured" in event_id:
            if event.get("configured", {}).get("testSize"):
                target(event_id["targetConfigured"])
        elif "testResult" in event_id:
            key = event_id["testResult"]
            # Attempts are reported in order; the last one decides.
            for output in event.get("testResult", {}).get("testActionOutput", []):
                if output["name"] == "test.xml":
                    where = urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)
                    target(key).logs[(key.get("run", 1), key.get("shard", 1))] = where
        elif "testSummary" in event_id:
            summary = target(event_id["testSummary"])
            results = event.get("testSummary", {})
            summary.status = results.get("overallStatus", "NO_STATUS")
            summary.seconds = int(results.get("totalRunDurationMillis", 0)) / 1000
            # A flaky target passed in the end.
            summary.ok = summary.status in ("PASSED", "FLAKY")
        elif "targetCompleted" in event_id and not event.get("completed", {}).get("success"):
            # No summary follows. (A test that is built and then fails completes with success.)
            if event_id["targetCompleted"]["label"] in targets:
                target(event_id["targetCompleted"]).status = "failed to build"
    return targets


def is_gtest(root):
    """Whether an XML report is GoogleTest's own: Bazel makes one up for programs that write none."""
    return root.tag == "testsuites" and "timestamp" in root.attrib


def count_cases(root, label, counts):
    for case in root.iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            counts.fail(f"{label}: {name}")
        elif case.find("skipped") is not None or case.get("status") == "notrun":
            counts.skipped += 1
        else:
            counts.passed += 1


def count_target(target, counts):
    """Adds the cases of one target, whatever shape it is in."""
    failed_before = counts.failed
    cases_before = counts.passed + counts.failed + counts.skipped
    for path in target.logs.values():
        try:
            root = ElementTree.parse(path).getroot()
        except (OSError, ElementTree.ParseError):
            continue  # the program died before it wrote its report; its status says so
        if is_gtest(root):
            count_cases(root, target.label, counts)
    if target.ok:
        if counts.passed + counts.failed + counts.skipped == cases_before:
            counts.passed += 1  # a test that is no GoogleTest program
    elif counts.failed == failed_before:
        counts.fail(f"{target.label}: {target.status.replace('_', ' ')}")


def why_run_failed(events):
    """The result of the run as a whole, from Bazel: None, or why it failed."""
    for event in events:
        if "buildFinished" in event.get("id", {}):
            # Zero is not written.
            status = event.get("finished", {}).get("exitCode", {}).get("code", 0)
            return f"exit status {status}, see above" if status else None
    return "did not end, see above"


def count_run(events, name, counts):
    """Adds the results of the run `name`; returns its targets."""
    failed_before = counts.failed
    cases_before = counts.passed + counts.failed
    targets = collect_targets(events, name)
    for label in sorted(targets):
        count_target(targets[label], counts)
    why = why_run_failed(events)
    if why and counts.failed == failed_before:
        # For example a BUILD file with an error: no target failed because none was looked at.
        counts.fail(f"{name}bazel test: {why}")
    if counts.passed + counts.failed == cases_before:
        counts.fail(f"{name}no test ran")
    return list(targets.values())


def print_slowest(targets):
    """Where the time of the tests goes: the longest first, equals by label."""
    slowest = sorted(targets, key=lambda target: (-target.seconds, target.label))
    slowest = [target for target in slowest if target.seconds > 0][:SLOWEST]
    if slowest:
        print(f"The slowest {len(slowest)} of {len(targets)} test targets:")
    for target in slowest:
        print(f"{target.seconds:8.1f} s  {target.label}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("events", nargs="+", help="build event file (JSON) of a run")
    paths = parser.parse_args().events

    counts = Counts()
    targets = []
    for path in paths:
        name = f"{Path(path).stem}: " if len(paths) > 1 else ""
        targets += count_run(read_events(path), name, counts)
    print_slowest(targets)
    for message in counts.messages:
        print(f"FAILED {message}")
    skipped = f", {counts.skipped} skipped" if counts.skipped else ""
    print(f"{counts.passed} passed, {counts.failed} failed{skipped}")
    return 1 if counts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
