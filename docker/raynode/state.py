"""The head's state on a volume: what Ray's GCS knows of jobs and nodes, for the head that starts there next.

It is kept where RAY_HEAD_STATE names a folder, below which each version of Ray has its own. State with which the head
can't start is set aside: without it there is no history, with it there would be no head.
"""

import os
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

FOLDER = "RAY_HEAD_STATE"
# A single one may have been stopped, or killed for another reason.
STARTS = 2


@dataclass(frozen=True)
class State:
    """The GCS's database in `folder`, beside the count of starts with it after which no head was well."""

    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """What makes Ray keep its state here."""
        return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.folder)}

    def begin(self) -> None:
        """Count one more start, with the state set aside if the last ones came to nothing."""
        if self._starts.exists() and self._starts.stat().st_size >= STARTS:
            self._set_aside()
        with self._starts.open("a") as starts:
            starts.write(".")

    def settle(self) -> None:
        """Count from zero again: the head is well with this state."""
        self._starts.unlink(missing_ok=True)

    @property
    def _starts(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.starts")

    def _set_aside(self) -> None:
        aside = self.folder.with_name(f"{self.folder.name}.aside")
        print(f"ray-head: {STARTS} starts with {self.folder} failed; it goes to {aside}, and the head begins anew")
        sys.stdout.flush()
        shutil.rmtree(aside, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(aside)
        self.settle()


def opened() -> State | None:
    """The state for this version of Ray, one start counted; None where there is no folder for it."""
    given = os.environ.get(FOLDER)
    if not given:
        return None
    state = State(Path(given) / version("ray"))
    try:
        state.begin()
    except OSError as cause:
        print(f"ray-head: {FOLDER}: {cause}; the head's state ends with its container", file=sys.stderr, flush=True)
        return None
    return state
