"""One run of the slow model on a local cluster, for tests and drills that disturb it.

The run may take several commands: each test or drill starts the command again where a user would.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.aws import BUCKET
from tests.local_cluster import LocalCluster
from tests.slow_model import FOLDER_VARIABLE
from tests.waiting import until

EPOCHS = 3
STEPS_PER_EPOCH = 11
WORKERS = 2
# Enough images for these steps of the default batch on two workers. Unlike the digits, they need no scikit-learn.
MODEL_FLAGS = ("--model", "tests.slow_model:SlowModel", "--dataset", "synthetic", "--samples", "1438")
RUN_FLAGS = ("--epochs", str(EPOCHS), "--num-workers", str(WORKERS), "--max-restarts", "3")
# A checkpoint after each step, or as soon as the previous one is saved.
EVERY_STEP = ("--checkpoint-seconds", "0")
START_SECONDS = 180.0
END_SECONDS = 400.0


@dataclass
class DisturbedRun:
    """A run on a cluster whose nodes have the variable SLOW_MODEL_FOLDER.

    Attributes:
        cluster: The cluster.
        name: The run's name.
        flags: Flags of the run in addition to MODEL_FLAGS and RUN_FLAGS.
        command: The latest command.
    """

    cluster: LocalCluster
    name: str
    flags: tuple[str, ...] = EVERY_STEP
    command: subprocess.Popen[bytes] | None = None

    def start(self, *more: str, step_seconds: float = 0.25, fail_at: int | None = None) -> DisturbedRun:
        """Start the command, for the first time or again.

        Args:
            more: Flags of this command alone.
            step_seconds: The duration of a training step.
            fail_at: The step of each process that raises ValueError.
        """
        settings = {"seconds": step_seconds, "fail_at": fail_at}
        (self.runs_folder / f"{self.name}.json").write_text(json.dumps(settings))
        location = ("--storage-path", self.storage_path, "--run-name", self.name)
        self.start_command(*MODEL_FLAGS, *RUN_FLAGS, *location, *self.flags, *more)
        return self

    def start_command(self, *flags: str) -> None:
        """Start `python -m training` with exactly these flags."""
        with self.log_file.open("ab") as log:
            self.command = self.cluster.start_training(*flags, log=log)

    @property
    def runs_folder(self) -> Path:
        """The folder with the settings, step logs and outputs of all runs."""
        return Path(self.cluster.environment[FOLDER_VARIABLE])

    @property
    def storage_path(self) -> str:
        """Where the training keeps its runs."""
        return str(self.runs_folder)

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.runs_folder / self.name

    @property
    def log_file(self) -> Path:
        """The file with the output of all commands."""
        return self.runs_folder / f"{self.name}.log"

    @property
    def log(self) -> str:
        """The output of all commands."""
        return self.log_file.read_text()

    @property
    def step_times(self) -> list[float]:
        """The Unix time at which both workers had made each step, including steps that were lost."""
        file = self.runs_folder / f"{self.name}.steps"
        lines = file.read_text().splitlines() if file.exists() else []
        return sorted(float(line) for line in lines)[WORKERS - 1 :: WORKERS]

    @property
    def saved_step(self) -> int:
        """The step of the newest whole checkpoint in the folder; 0 without one, as for a run in a bucket."""
        saved = self.folder.glob("checkpoint_*/checkpoint.json")
        return max((int(each.parent.name.rpartition("_")[2]) for each in saved), default=0)

    def wait_for_steps(self, count: int, saved: int = 0) -> None:
        """Wait until the workers have made `count` steps and saved step `saved`; the run must not have ended."""

        def is_there() -> bool:
            return len(self.step_times) >= count and self.saved_step >= saved

        until(lambda: is_there() or self.has_ended, START_SECONDS)
        if self.has_ended:
            raise AssertionError(f"the command ended: {self.log}")

    @property
    def has_ended(self) -> bool:
        """Whether the latest command has ended."""
        return self.command is None or self.command.poll() is not None

    def finish(self, seconds: float = END_SECONDS, replace: bool = True) -> int:
        """Wait for the command's end and return its exit status; replace ended nodes meanwhile, as ECS does."""

        def has_ended() -> bool:
            if replace:
                self.cluster.replace_ended()
            return self.has_ended

        until(has_ended, seconds)
        return self.command.returncode if self.command else 0

    def read_json(self, name: str) -> Any:
        """Return a JSON document of the run's folder."""
        return json.loads((self.folder / name).read_text())

    @property
    def weights(self) -> dict[str, Tensor]:
        """The final weights."""
        return torch.load(self.folder / "model.pt", weights_only=True)

    def has_weights_of(self, other: DisturbedRun) -> bool:
        """Whether the final weights are the other run's, bit by bit."""
        mine, theirs = self.weights, other.weights
        return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


@dataclass
class S3Run(DisturbedRun):
    """A run whose storage is the bucket of the tests.

    Attributes:
        client: A boto3 client of its S3.
    """

    client: Any = None

    @property
    def storage_path(self) -> str:
        """Where the training keeps its runs."""
        return f"s3://{BUCKET}/runs"

    @property
    def weights(self) -> dict[str, Tensor]:
        """The final weights."""
        stored = self.client.get_object(Bucket=BUCKET, Key=f"runs/{self.name}/model.pt")
        return torch.load(BytesIO(stored["Body"].read()), weights_only=True)
