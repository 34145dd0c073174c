"""The head's state on a volume: the database of Ray's GCS with its nodes and jobs, for the next head on the instance.

RAY_HEAD_STATE names the folder, below which each version of Ray has its own. A state with which the head can't start is
quarantined: without it the head has no history, with it there would be no head.
"""

import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ray_on_ecs.contract import HEAD_STATE_VARIABLE

# One failed start is not enough: the head may have been stopped, or killed for another reason.
MAX_FAILED_STARTS = 2


@dataclass(frozen=True)
class State:
    """The GCS database in `folder`, a counter of consecutive starts that never became healthy, and a list of jobs.

    The jobs are those that a head stopped because it was stopped itself; the next head submits them again.
    """

    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that make Ray keep its state here."""
        return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.folder)}

    @property
    def interrupted_jobs(self) -> set[str]:
        """The IDs of the jobs that the previous head stopped because it was stopped itself."""
        return set(self._interrupted.read_text().splitlines()) if self._interrupted.exists() else set()

    def record_interrupted(self, jobs: Iterable[str]) -> None:
        """Record jobs that this head stops because it is being stopped itself.

        Raises:
            OSError: The folder can't be written.
        """
        with self._interrupted.open("a") as file:
            file.writelines(f"{job}\n" for job in jobs)

    def record_start(self) -> None:
        """Count one more start; quarantine the state first if the previous starts with it failed.

        Raises:
            OSError: The folder can't be written.
        """
        if self._starts.exists() and self._starts.stat().st_size >= MAX_FAILED_STARTS:
            self._quarantine()
        with self._starts.open("a") as starts:
            starts.write(".")

    def mark_healthy(self) -> None:
        """Count failed starts from zero again, and forget the interrupted jobs: the head has recovered them."""
        self._starts.unlink(missing_ok=True)
        self._interrupted.unlink(missing_ok=True)

    @property
    def _starts(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.starts")

    @property
    def _interrupted(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.interrupted")

    def _quarantine(self) -> None:
        quarantine = self.folder.with_name(f"{self.folder.name}.quarantine")
        print(
            f"ray-head: {MAX_FAILED_STARTS} starts with {self.folder} failed; moving it to {quarantine} and starting "
            "without state",
            flush=True,
        )
        shutil.rmtree(quarantine, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(quarantine)
        self.mark_healthy()


def open_state() -> State | None:
    """Return the state for this version of Ray, with this start recorded, or None if there is no folder for it."""
    folder = os.environ.get(HEAD_STATE_VARIABLE)
    if not folder:
        return None
    state = State(Path(folder) / version("ray"))
    try:
        state.record_start()
    except OSError as cause:
        line = f"ray-head: {HEAD_STATE_VARIABLE}: {cause}; the head's state ends with its container"
        print(line, file=sys.stderr, flush=True)
        return None
    return state
