"""Write activity in a run's folder, from one scan to the next: logs, files that are still open, and quiet times."""

from __future__ import annotations

from collections.abc import Mapping

from ray_on_ecs.run.folder_scan import FileState, Scan, is_growing

# A file that has changed in every scan for this time is a log. One that was open meanwhile may be a checkpoint that is
# being written: it has longer.
RESTLESS_SECONDS, OPEN_SECONDS = 30.0, 300.0
LOG_SECONDS = 10.0


class FolderActivity:
    """Compares each scan of a folder with the earlier ones.

    Args:
        files: The scan before the first.

    Attributes:
        logs: The files that are written until the run ends; a part need not wait for them.
        busy: The other files that were open for writing in the last scan.
        data: The files of the last scan that are not logs.
        quiet_since: The time since which `data` has not changed.
    """

    def __init__(self, files: Scan) -> None:
        self.logs: set[str] = set()
        self.busy: set[str] = set()
        self.data: Scan = {}
        self.quiet_since = 0.0
        self._files = files
        self._changing_since: dict[str, float] = {}
        self._open_since: dict[str, float] = {}
        self._grown_at: dict[str, float] = {}  # of files that are logs by their names

    def update(self, files: Scan, open_files: Mapping[str, bool], now: float) -> None:
        """Take a new scan into account.

        Args:
            files: The scan.
            open_files: The files that are open for writing; the value is True for append mode only.
            now: The time of the scan.
        """
        changing = {name for name, state in files.items() if self._files.get(name, state) != state}
        self._files = files
        self._changing_since = {name: self._changing_since.get(name, now) for name in changing}
        self._open_since = {name: self._open_since.get(name, now) for name in open_files}
        self._grown_at |= dict.fromkeys(filter(is_growing, changing), now)
        appended = {name for name, is_appended in open_files.items() if is_appended or is_growing(name)}
        growing = {name for name, grown_at in self._grown_at.items() if now - grown_at < LOG_SECONDS}
        restless = {name for name, since in self._changing_since.items() if now - since >= RESTLESS_SECONDS}
        long_open = {name for name, since in self._open_since.items() if now - since >= OPEN_SECONDS}
        self.logs = (appended | growing | long_open | (restless - open_files.keys())) & files.keys()
        self.busy = (open_files.keys() & files.keys()) - self.logs
        data = without_logs(files, self.logs)
        if data != self.data or self.busy:
            self.data, self.quiet_since = data, now


def without_logs(files: Mapping[str, FileState], logs: set[str]) -> Scan:
    """Return the states of the files that are not logs."""
    return {name: state for name, state in files.items() if name not in logs}
