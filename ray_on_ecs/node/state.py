"""Head state on a volume: the GCS database with the cluster's nodes, for the next head on the instance.

RAY_HEAD_STATE is the folder, with a subfolder for each version of Ray. A state with which the head can't start is
quarantined: a head without its history is better than no head.
"""

import logging
import os
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ray_on_ecs.contract import HEAD_STATE_VARIABLE

logger = logging.getLogger(__name__)

# More than one: a head may have been stopped during its start, or killed for another reason.
MAX_FAILED_STARTS = 2


@dataclass(frozen=True)
class State:
    """GCS database in `folder` and, beside it, a counter of consecutive failed starts."""

    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that make Ray store its state in the folder."""
        return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.folder)}

    def record_start(self) -> None:
        """Count a start; first quarantine a state whose last starts failed. OSError if the folder can't be written."""
        starts, quarantine = self._beside("starts"), self._beside("quarantine")
        if starts.exists() and starts.stat().st_size >= MAX_FAILED_STARTS:
            logger.info(f"{MAX_FAILED_STARTS} starts with {self.folder} failed; moving it to {quarantine}")
            shutil.rmtree(quarantine, ignore_errors=True)
            if self.folder.exists():
                self.folder.rename(quarantine)
            self.mark_healthy()
        with starts.open("a") as file:
            file.write(".")

    def mark_healthy(self) -> None:
        """Reset the failed starts."""
        self._beside("starts").unlink(missing_ok=True)

    def _beside(self, kind: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{kind}")


def open_state() -> State | None:
    """Return the state of this version of Ray, with this start recorded; None without a usable folder."""
    folder = os.environ.get(HEAD_STATE_VARIABLE)
    if not folder:
        return None
    state = State(Path(folder) / version("ray"))
    try:
        state.record_start()
    except OSError as cause:
        logger.warning(f"{HEAD_STATE_VARIABLE}: {cause}; the head's state ends with its container")
        return None
    return state
