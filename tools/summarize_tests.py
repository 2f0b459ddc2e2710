#!/usr/bin/env python3
"""Counts GoogleTest cases over all test targets of one Bazel run.

Reads the run's build event file (bazel test --build_event_json_file=FILE), so that logs of earlier
runs are not counted, and the test.xml of every shard. A target that failed without a failed case (it
did not build, crashed, or ran out of time) counts as one failure and is named. A test without
GoogleTest's XML (a shell test) counts as one case. Prints the slowest targets with their seconds
(those of the first run, where Bazel took the result from its cache), then what failed. The last
line is "N passed, N failed", with ", N skipped" if any were. Exits non-zero if anything failed or
nothing ran.
"""

import argparse
import json
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

SLOWEST = 20  # targets that are printed


@dataclass
class Target:
    """One test target of the run."""

    label: str
    ok: bool = False
    status: str = "did not run"
    seconds: float = 0  # of all shards and attempts together
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
    """The events of a build event file, which has one JSON object a line."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def collect_targets(events):
    """The test targets that the run wanted, by label, with what became of each."""
    targets = {}

    def target(event_id):
        return targets.setdefault(event_id["label"], Target(event_id["label"]))

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


def summarize(targets):
    counts = Counts()
    for label in sorted(targets):
        count_target(targets[label], counts)
    return counts


def print_slowest(targets):
    """Where the time of the tests goes: the longest first, equals by label."""
    slowest = sorted(targets.values(), key=lambda target: (-target.seconds, target.label))
    slowest = [target for target in slowest if target.seconds > 0][:SLOWEST]
    if slowest:
        print(f"The slowest {len(slowest)} of {len(targets)} test targets:")
    for target in slowest:
        print(f"{target.seconds:8.1f} s  {target.label}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("events", help="build event file (JSON) of the run")
    parser.add_argument("--bazel-status", type=int, default=0, help="exit status of bazel test")
    arguments = parser.parse_args()

    targets = collect_targets(read_events(arguments.events))
    counts = summarize(targets)
    if arguments.bazel_status and not counts.failed:
        # For example a BUILD file with an error: no target failed because none was looked at.
        counts.fail(f"bazel test: exit status {arguments.bazel_status}, see above")
    if not (counts.passed or counts.failed):
        counts.fail("no test ran")
    print_slowest(targets)
    for message in counts.messages:
        print(f"FAILED {message}")
    skipped = f", {counts.skipped} skipped" if counts.skipped else ""
    print(f"{counts.passed} passed, {counts.failed} failed{skipped}")
    return 1 if counts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
