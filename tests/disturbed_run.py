"""One run of a script with a Checkpointer on a local cluster, for tests and drills that disturb it.

The run may take several commands: each test or drill repeats the command when a user would.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.aws import BUCKET
from tests.local_cluster import REPOSITORY, LocalCluster
from tests.waiting import LIMIT_SECONDS, until

SLOW_STEPS = REPOSITORY / "tests" / "slow_steps"
# The nodes' environment variable with the folder of the settings and step logs.
FOLDER_VARIABLE = "SLOW_STEPS"
WORKERS = 2
RUN_FLAGS = ("--num-workers", str(WORKERS), "--max-restarts", "3")
# A checkpoint as soon as the previous one is saved.
AT_ONCE = 0.01
END_SECONDS = 2 * LIMIT_SECONDS  # of a whole run


class Script(NamedTuple):
    """A script with a Checkpointer that exports its weights.

    Attributes:
        path: Its path in the repository.
        steps_per_epoch: Its steps on two workers.
        flags: Its flags, but for --epochs.
        weights: The file of its weights.
    """

    path: str
    steps_per_epoch: int
    flags: tuple[str, ...] = ()
    weights: str = "model.safetensors"


# The digits make eleven steps of the default batch on two workers.
CLASSIFIER = Script("training/image_classifier.py", 11, ("--data", "digits", "--model", "small_model:build"))
# The texts of the documentation make more steps, of which it takes the first ones.
LANGUAGE = Script(
    "training/language_model.py",
    33,
    ("--data", str(REPOSITORY / "docs" / "design"), "--context", "64", "--global-batch-size", "4", "--max-steps", "66",
     "--checkpoint-seconds", "1"),
    "model/model.safetensors",
)  # fmt: skip
EXAMPLE = Script("examples/ddp_checkpointer.py", 32)


@dataclass
class DisturbedRun:
    """A run on a cluster whose nodes have the variable SLOW_STEPS.

    Attributes:
        cluster: The cluster.
        name: The run's name.
        flags: Flags of the run in addition to RUN_FLAGS.
        script: The script.
        epochs: Its epochs.
        every_seconds: The time between two checkpoints within an epoch; None for checkpoints only at its end.
        command: The latest command.
    """

    cluster: LocalCluster
    name: str
    flags: tuple[str, ...] = ()
    script: Script = CLASSIFIER
    epochs: int = 3
    every_seconds: float | None = AT_ONCE
    command: subprocess.Popen[bytes] | None = None

    def start(self, *more: str, step_seconds: float = 0.25, fail_at: int | None = None) -> DisturbedRun:
        """Start the command, for the first time or again.

        Args:
            more: Flags only of this command.
            step_seconds: The duration of a training step.
            fail_at: The step of each process that raises ValueError.
        """
        self.set_steps(step_seconds, fail_at)
        folder, name = os.path.split(REPOSITORY / self.script.path)
        self.start_command(
            *("--storage-path", self.storage_path, "--run-name", self.name, *RUN_FLAGS, *self.flags, *more),
            *("--working-dir", folder, "--env", f"PYTHONPATH={SLOW_STEPS}{os.pathsep}{REPOSITORY}"),
            *(name, *self.script.flags, "--epochs", str(self.epochs)),
        )
        return self

    def set_steps(self, seconds: float, fail_at: int | None = None) -> None:
        """Set how processes of the script that start later make their steps."""
        settings = {"seconds": seconds, "fail_at": fail_at, "every_seconds": self.every_seconds}
        (self.runs_folder / f"{self.name}.json").write_text(json.dumps(settings))

    def start_command(self, *flags: str) -> None:
        """Start a run with exactly these flags."""
        with self.log_file.open("ab") as log:
            self.command = self.cluster.start_training(*flags, log=log)

    @property
    def runs_folder(self) -> Path:
        """The folder with the settings, step logs and outputs of all runs."""
        return Path(self.cluster.environment[FOLDER_VARIABLE])

    @property
    def storage_path(self) -> str:
        """The storage path of the runs."""
        return str(self.runs_folder)

    @property
    def folder(self) -> Path:
        """The run's folder."""
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
    def steps(self) -> int:
        """The steps of the whole training."""
        return self.epochs * self.script.steps_per_epoch

    @property
    def step_times(self) -> list[float]:
        """The Unix time at which both workers had made each step, including steps that were lost."""
        file = self.runs_folder / f"{self.name}.steps"
        lines = file.read_text().splitlines() if file.exists() else []
        return sorted(float(line) for line in lines)[WORKERS - 1 :: WORKERS]

    @property
    def saved_step(self) -> int:
        """The step of the newest whole checkpoint in the folder; 0 without one, as for a run in a bucket."""
        saved = self.folder.glob("checkpoints/step-*/checkpoint.json")
        return max((int(each.parent.name.split("-")[1]) for each in saved), default=0)

    @property
    def ranks(self) -> list[psutil.Process]:
        """The script's processes."""
        return self.cluster.script_processes(Path(self.script.path).name)

    def wait_for_steps(self, count: int, saved: int = 0) -> None:
        """Wait until the workers have made `count` steps and saved step `saved`; the run must not have ended."""

        def is_there() -> bool:
            return len(self.step_times) >= count and self.saved_step >= saved

        until(lambda: is_there() or self.has_ended)
        if self.has_ended:
            raise AssertionError(f"the command ended: {self.log}")

    @property
    def has_ended(self) -> bool:
        """Return whether the latest command has ended."""
        return self.command is None or self.command.poll() is not None

    def finish(self, seconds: float = END_SECONDS) -> int:
        """Wait for the command's end and return its exit status; replace ended nodes meanwhile, as ECS does."""

        def has_ended() -> bool:
            self.cluster.replace_ended()
            return self.has_ended

        until(has_ended, seconds)
        return self.command.returncode if self.command else 0

    def read(self, name: str) -> bytes:
        """Return a file of the run's folder."""
        return (self.folder / name).read_bytes()

    def has_weights_of(self, other: DisturbedRun) -> bool:
        """Return whether the final weights equal the other run's, bit by bit."""
        return self.read(self.script.weights) == other.read(self.script.weights)


@dataclass
class S3Run(DisturbedRun):
    """A run whose storage is the bucket of the tests.

    Attributes:
        client: A boto3 client of its S3.
    """

    client: Any = None

    @property
    def storage_path(self) -> str:
        """The storage path of the runs."""
        return f"s3://{BUCKET}/runs"

    def read(self, name: str) -> bytes:
        """Return a file of the run's folder."""
        return self.client.get_object(Bucket=BUCKET, Key=f"runs/{self.name}/{name}")["Body"].read()
