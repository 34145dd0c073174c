"""The metrics of a script, from its output and from `ray_on_ecs.sdk`: a record for each step that logged some."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ray_on_ecs import sdk
from ray_on_ecs.node.outage import Outage
from ray_on_ecs.rules import finite
from ray_on_ecs.run.extent import Extent, Position
from ray_on_ecs.run.printed import LONGEST, Printed, PrintedNumbers
from ray_on_ecs.run.printed_steps import PrintedSteps
from ray_on_ecs.run.traceback_lines import TracebackLines
from ray_on_ecs.storage.run_storage import RunStorage, parse_json
from ray_on_ecs.tracking.end import Steps
from ray_on_ecs.tracking.records import RESERVED, STEP, RecordFile, merge_records, read_records
from ray_on_ecs.tracking.shown_log import COLOURS

logger = logging.getLogger(__name__)

TOTAL_STEPS = "total_steps"  # the metric of --metric, and of Ray Train, that is the number of all steps
NEAR = 0.05  # a printed step is as far from the reported one, as both are read now and then
# W&B: "View run at https://…", MLflow: "View run NAME at: https://…", Comet: "Experiment is live on comet.com https://…"
TRACKER = re.compile(r"(?:View run\b.* at:?|Experiment is live on comet\.com) (https?://[^\s\[\]]+)")


def tracker_url(line: str) -> str | None:
    """Return the page of the run that an experiment tracker prints in this line of output, or None."""
    if "://" not in line:
        return None
    match = TRACKER.search(COLOURS.sub("", line[:LONGEST]))
    return match[1] if match else None


class MetricsLog:
    """The records of a run, in order: `step`, `time` (UTC) and the metrics by name.

    A value of a name that the latest record has begins a new record. A start that resumes logs some steps again: the
    first one replaces the records of this step and of later ones, and so does a step back within a start. Where a
    script counts its steps from 0 in each epoch, nothing is replaced, and the numbers of the records go on.

    Args:
        patterns: A regular expression with one group for each metric that is taken from the output.
        history: The records of the run's earlier parts.

    Attributes:
        step: Steps done, as the script reports them.
        total: All steps, as the script reports them; None if it does not.
        guess: The last loss in the output, with the step on its line or that of a progress bar; None if there are
            patterns, or as soon as the script reports by itself. It is shown, and is not a record.
        extent: Where this start of the script began, and how far it is.
    """

    def __init__(self, patterns: Mapping[str, str], history: Sequence[dict[str, Any]] = ()) -> None:
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self._lock = threading.Lock()
        self._tracebacks, self._printed = TracebackLines(), PrintedNumbers()
        self._printed_steps = PrintedSteps()
        self._records = list(history)
        # By number: where the script was when it printed a record whose step is not known.
        self._positions: dict[int, Position] = {}
        self._has_begun = False  # this start has a record
        # The first and the last step with a record, of this start or of its epoch if the steps begin again in each.
        self._counted: tuple[int, int] | None = None
        self._begins_again = False
        self._offset = 0  # of the records' steps
        self._left_out: set[str] = set()
        self._bar: int | None = None  # the step of the last progress bar
        self._changed = len(self._records)
        self._is_open = False
        self.extent = Extent()
        self.step: int | None = None
        self.total: int | None = None
        self.guess: dict[str, Any] | None = None if patterns or history else {}

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records so far."""
        with self._lock:
            return [dict(record) for record in self._records]

    @property
    def last(self) -> tuple[int, dict[str, Any]] | None:
        """The number of the last record, from 0, and the record."""
        with self._lock:
            return (len(self._records) - 1, dict(self._records[-1])) if self._records else None

    @property
    def steps(self) -> Steps | None:
        """The steps of this start that are done, and all of them, as reported or else as printed.

        A count of the same steps may be printed beside reports without all steps, as those of a Checkpointer.
        """
        step, total, printed = self.step, self.total, self._printed_steps.steps
        if step is None:
            return printed
        if total is None and printed and TOTAL_STEPS not in self._patterns:
            total = printed.total if abs(printed.step - step) <= max(1, NEAR * step) else None
        return Steps(step, total)

    def take(self, begin: Callable[[int], int]) -> tuple[int, list[dict[str, Any]]]:
        """Return what has changed since the last call (see `Records`)."""
        with self._lock:
            changed, self._changed = self._changed, len(self._records)
            if changed == len(self._records):
                return changed, []
            first = begin(changed)
            return first, [dict(record) for record in self._records[first:]]

    def put_back(self, first: int) -> None:
        """Count the records from this number on as changed."""
        with self._lock:
            self._changed = min(self._changed, first)

    def read_line(self, line: str) -> None:
        """Take the metrics of a line of output. A matched text that is not a number counts as null."""
        if self._tracebacks.has(line):
            return
        printed = self._printed.read(line)
        self.extent = self.extent.at(printed.step, printed.epoch)
        self._printed_steps.read(line, printed)
        line = COLOURS.sub("", line)
        values: dict[str, float | None] = {}
        for name, pattern in self._patterns.items():
            match = pattern.search(line)
            if match:
                values[name] = _number(match[1])
        step, total = values.pop(STEP, None), values.pop(TOTAL_STEPS, None)
        if total is not None:
            self.total = int(total)
        if step is not None:
            self.advance(int(step))
        if values:
            self.add(values)
        self._guess(printed)

    def _guess(self, printed: Printed) -> None:
        """Take the loss of a line with the step of the line, or of the bar before it; and the step of a bar."""
        if printed.is_bar:
            self._bar = printed.step
        if printed.loss is None and not printed.is_bar:
            return
        step = self._bar if printed.step is None else printed.step
        loss = {} if printed.loss is None else {"loss": finite(printed.loss)}
        with self._lock:
            if self.guess is not None and not (printed.is_mean and "loss" in self.guess):
                kept = self.guess if printed.loss is None else {}
                self.guess = {**kept, **loss, **({} if step is None else {STEP: step})}

    def advance(self, step: int) -> None:
        """Take the number of steps that are done; metrics that follow are of another record."""
        with self._lock:
            if step != self.step:
                self._is_open = False
            self.step, self.guess = step, None
            self.extent = self.extent.reported(step)

    def take_report(self, report: Mapping[str, Any]) -> None:
        """Take a report of a script."""
        if report.get(sdk.AGAIN) and any(record[STEP] == report[sdk.STEP] for record in self.records):
            return
        if sdk.TOTAL in report:
            self.total = report[sdk.TOTAL] or None
        if sdk.NEXT in report and sdk.VALUES not in report:  # a Ray program goes back to its last checkpoint
            self._counted = None
        if report[sdk.STEP] is not None:
            self.advance(report[sdk.STEP])
        elif report.get(sdk.NEXT):
            last = self.last
            self.advance(last[1][STEP] + 1 if last else 1)
        if values := report.get(sdk.VALUES):
            self.add(values)

    def restart(self) -> None:
        """Forget the step: the script begins again."""
        with self._lock:
            self.step, self._is_open, self._has_begun, self._bar = None, False, False, None
            self._counted = None
            self._tracebacks, self._printed, self.extent = TracebackLines(), PrintedNumbers(), Extent()
            self._printed_steps, self.total = PrintedSteps(begins_again=self._printed_steps.begins_again), None

    def add(self, values: Mapping[str, float | None]) -> None:
        """Add metrics of the current step, without those whose names a record has for itself."""
        with self._lock:
            self.guess = None
            for name in [name for name in RESERVED if name in values]:
                if name not in self._left_out:
                    line = f"metric {name}: {values[name]} is left out, because every record has a {name}"
                    logger.warning(f"{line}; give the metric another name")
                self._left_out.add(name)
            values = {name: value for name, value in values.items() if name not in RESERVED}
            if not values:
                return
            if not self._is_open or not values.keys().isdisjoint(self._records[-1]):
                step = self.step
                if step is None:
                    self._drop_repeated()
                    step = self._records[-1][STEP] + 1 if self._records else 1
                else:
                    step = self._number(step)
                self._changed = min(self._changed, len(self._records))
                self._records.append({STEP: step, "time": datetime.now(UTC).isoformat(timespec="milliseconds")})
                self._is_open = self._has_begun = True
            self._changed = min(self._changed, len(self._records) - 1)
            self._records[-1].update(values)

    def _number(self, step: int) -> int:
        """Return the number of a step's record; a step back, or the first one of a start, drops what it replaces."""
        if self._counted is None and not self._begins_again:
            while self._records and self._records[-1][STEP] >= step:
                self._records.pop()
            self._offset = 0
        elif self._counted is None or 2 * step < sum(self._counted):
            if self._counted and not self._begins_again:
                line = f"step {step} follows step {self._counted[1]}, and its metrics those before"
                logger.warning(f"{line}; to resume them, count the steps from the start of the training")
            self._begins_again, self._counted = True, None
            last = self._records[-1][STEP]
            self._offset = max(last, last + 1 - step)
        else:
            number = step + self._offset
            while self._records and self._records[-1][STEP] >= number + self._is_open:
                self._records.pop()
        self._counted = (self._counted[0] if self._counted else step, step)
        return step + self._offset

    def _drop_repeated(self) -> None:
        """Before a record without a step: drop those of earlier starts from where this start began."""
        at, count = self.extent.last, len(self._records)
        if not self._has_begun and at is not None and not self.extent.falls:
            dropped = [number for number, position in self._positions.items() if number < count and position >= at]
            del self._records[min(dropped, default=count) :]
        self._positions.pop(len(self._records), None)
        if at is not None:
            self._positions[len(self._records)] = at


class MetricsRecorder:
    """Records the metrics of a run's script on rank 0, and keeps what the driver is told of them.

    Attributes:
        log: The records.
        url: The page of the run at an experiment tracker, once a line of output has named it.

    Raises:
        OSError: The records of the run's earlier parts can't be read.
    """

    def __init__(self, patterns: Mapping[str, str], storage: RunStorage) -> None:
        self.log = MetricsLog(patterns, read_records(storage))
        self.url: str | None = None
        self._file = RecordFile(storage)
        self._outage = Outage("the storage of the metrics", seconds=0)
        self._storage = storage

    def read_line(self, line: str) -> None:
        """Take the metrics of a line of output, and the address of the run at an experiment tracker."""
        self.log.read_line(line)
        self.url = tracker_url(line) or self.url

    @property
    def report(self) -> dict[str, Any]:
        """The fields of the worker's status."""
        log = self.log
        return {
            **{"step": log.step, "metrics": log.last, "guess": log.guess or {}, "url": self.url},
            **{"extent": log.extent, "steps": log.steps},
        }

    def write(self, *, is_last: bool = False) -> None:
        """Store new metrics, and merge their parts at the end; an error is printed, and the next call tries again."""
        if self.log.last is None:
            return

        def store() -> None:
            self._file.write(self.log)
            if is_last:
                merge_records(self._storage)

        self._outage.attempt(store, time.monotonic())


class ReportReader:
    """Reads what a script reports through `ray_on_ecs.sdk`, as it is written."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / sdk.REPORTS
        self._position = 0
        self._has_warned = False

    def read_new(self) -> list[dict[str, Any]]:
        """Return the reports since the last call; a line that is torn, as by a full disk, is left out."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._position)
                content = file.read()
        except FileNotFoundError:
            return []
        complete = content[: content.rfind(b"\n") + 1]
        self._position += len(complete)
        reports = [_report(line) for line in complete.splitlines()]
        if None in reports and not self._has_warned:
            self._has_warned = True
            logger.warning("a report of the script could not be read, and is left out; a full disk may have torn it")
        return [report for report in reports if report is not None]


def _report(line: bytes) -> dict[str, Any] | None:
    """Return a report of `ray_on_ecs.sdk`; None if the line has not got one."""
    with suppress(ValueError):
        report = parse_json(line)
        fields = (sdk.STEP, int | None), (sdk.TOTAL, int | None), (sdk.VALUES, dict | None)
        if isinstance(report, dict) and sdk.STEP in report:
            return report if all(isinstance(report.get(name), kind) for name, kind in fields) else None
    return None


def _number(text: str | None) -> float | None:
    with suppress(ValueError):
        return finite(float(text or ""))  # a group may match nothing
    return None
