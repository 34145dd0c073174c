"""Requests for the stacks of a run under way: the file by which a command asks its driver, and the driver's side."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from ray_on_ecs.jobs.driver_parent import FOLDER_VARIABLE
from ray_on_ecs.jobs.record import STACKS_REQUEST
from ray_on_ecs.run.group import WorkerStatus, WorkerStatuses

# The driver's own request, for a script that is silent and may be healthy.
SILENT = "silent"
# Its ID is the name of a folder.
REQUEST_ID = re.compile(r"\d{8}-\d{6}-\w{1,32}")
# How long the workers may take.
ANSWER_SECONDS = 30.0


class StacksRequest:
    """The request that the workers answer: its ID, empty if there is none."""

    def __init__(self) -> None:
        folder = os.environ.get(FOLDER_VARIABLE)
        self._file = Path(folder, STACKS_REQUEST) if folder else None
        self._seen = self._read()  # by a driver before this one
        self._until = 0.0
        self.request = ""

    def wanted(self) -> str:
        """Return the ID of the request, which may be new."""
        if not self.request and (found := self._read()) != self._seen:
            self._seen = found
            self.ask(found)
        return self.request

    def ask(self, request: str) -> None:
        """Begin a request."""
        self.request, self._until = request, time.monotonic() + ANSWER_SECONDS

    def are_there(self, workers: WorkerStatuses) -> bool:
        """Return True once there is a request that all workers have answered, or could have."""
        return bool(self.request) and (all(map(self._is_answered, workers.values())) or time.monotonic() > self._until)

    def _is_answered(self, worker: WorkerStatus) -> bool:
        has_answered = worker.stacks is not None and worker.stacks.request == self.request
        return has_answered or worker.started_at is None or worker.has_ended

    def end(self) -> None:
        """End the request."""
        self.request = ""

    def _read(self) -> str:
        try:
            text = self._file.read_text() if self._file else ""
        except OSError:
            return ""
        return text if REQUEST_ID.fullmatch(text) else ""
