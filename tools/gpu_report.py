# SPDX-License-Identifier: Apache-2.0
"""Results of a bundle's programs, read from their outputs: rows of a table, and the log."""
import re
import threading

KEPT = 400_000  # bytes of each output in the log
LOG = 15_000_000  # bytes that the log should not exceed


def ending(statuses):
    """Which ranks did not end well, and how; '' if all did."""
    if not statuses:
        return "no time was left"
    words = []
    for rank, status in enumerate(statuses):
        if status != 0:
            word = ("hung" if status is None else
                    f"exit status {status}" if status > 0 else f"signal {-status}")
            words.append(word if len(statuses) == 1 else f"rank {rank}: {word}")
    return ", ".join(words)


def text_of(output):
    return output.decode(errors="replace")


def values_of(outputs):
    """The rows of the lines 'name<TAB>value<TAB>unit' of the first rank."""
    lines = text_of(outputs[0]).splitlines() if outputs else []
    fields = [line.split("\t") for line in lines if line.count("\t") == 2]
    return [(name, f"{value} {unit}".strip(), "") for name, value, unit in fields]


class Tests:
    """Results that GoogleTest printed, so that it counts for a program that was killed, too."""

    def __init__(self, outputs):
        states = {}
        for output in outputs:
            for state, name in re.findall(
                    r"\[ +(RUN|OK|FAILED|SKIPPED) +\] ([^\s,]+\.[^\s,]+)", text_of(output)):
                if states.get(name) != "FAILED":
                    states[name] = state
        self.passed, self.skipped, self.failed, self.unfinished = (
            [name for name, state in states.items() if state == wanted]
            for wanted in ("OK", "SKIPPED", "FAILED", "RUN"))

    def __str__(self):
        text = f"{len(self.passed)} passed"
        if self.skipped:
            text += f", {len(self.skipped)} skipped"
        if self.failed:
            text += f", {len(self.failed)} failed: " + ", ".join(self.failed)
        if self.unfinished:
            text += ", not ended: " + ", ".join(self.unfinished)
        return text


def rows_of_tests(outcome, end):
    tests = Tests(outcome.outputs)
    result = f"{tests} ({end})" if end else str(tests)
    rows = [(outcome.check.name, result, f"{outcome.seconds:.0f}")]
    return rows + values_of(outcome.outputs), bool(not end and tests.passed and not tests.failed)


def rows_of_bench(outcome, end):
    rows = values_of(outcome.outputs)
    well = bool(rows) and not end
    if not well:
        rows.append((outcome.check.name, end or "no values", f"{outcome.seconds:.0f}"))
    return rows, well


def rows_of_program(outcome, end):
    rows = [(outcome.check.name, end or "passed", f"{outcome.seconds:.0f}")]
    return rows + values_of(outcome.outputs), not end


def rows_of_quick(outcome, end):
    return [(outcome.check.name, end, f"{outcome.seconds:.0f}")] if end else [], not end


def rows_of_libraries(outcome, end):
    """Rows of libraries that `ldd` does not find."""
    lines = text_of(b"".join(outcome.outputs)).splitlines()
    missing = [line.strip() for line in lines if "not found" in line]
    return rows_of_quick(outcome, end or "; ".join(missing))


def rows_of_lines(outcome, end):
    lines = text_of(b"".join(outcome.outputs)).splitlines()
    results = [end] if end else lines
    return [(outcome.check.name, result, "") for result in results], not end


READERS = {"tests": rows_of_tests, "bench": rows_of_bench, "program": rows_of_program,
           "quick": rows_of_quick, "libraries": rows_of_libraries, "lines": rows_of_lines}


def rows_of(outcome):
    """Rows of the table (name, result, seconds), and whether all is well."""
    return READERS[outcome.check.kind](outcome, ending(outcome.statuses))


def table(machine, rows):
    """The rows in Markdown."""
    lines = [machine, "", "| what | result | seconds |", "|---|---|---|"]
    for row in rows:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


class Report:
    """Writes the results so far at any time: table.md and log.txt."""

    def __init__(self, out):
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.machine, self.rows, self.well = out, "", [], True
        self.lock = threading.Lock()
        self.log = open(out / "log.txt", "wb", buffering=0)

    def add(self, outcome):
        rows, well = rows_of(outcome)
        room = max(10_000, (LOG - self.log.tell()) // 10)
        self.write(rows, well, outcome.log(min(KEPT, room)))

    def write(self, rows, well=True, text=b""):
        with self.lock:
            self.log.write(text)
            self.rows += rows
            self.well &= well
            new = self.out / "table.new"
            new.write_text(table(self.machine, self.rows))
            new.replace(self.out / "table.md")
            for row in rows:
                print(": ".join(filter(None, row)), flush=True)
