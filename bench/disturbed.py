"""A run of a slow model on a cluster of nodes, for whoever disturbs it; it may take several commands to its end."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.nodes import Nodes, until
from bench.slow import FOLDER

EPOCHS, STEPS, WORKERS = 3, 11, 2
FLAGS = (
    *("--model", "bench.slow:Slow", "--dataset", "digits", "--epochs", str(EPOCHS), "--num-workers", str(WORKERS)),
    *("--max-failures", "3"),
)
OFTEN = ("--checkpoint-seconds", "0")
START_SECONDS, END_SECONDS = 180.0, 400.0


@dataclass
class Run:
    """A run on a cluster whose nodes have the variable SLOW_FOLDER.

    Attributes:
        nodes: The cluster.
        name: The run's name.
        flags: Flags beside its own.
        command: The latest command.
    """

    nodes: Nodes
    name: str
    flags: tuple[str, ...] = OFTEN
    command: subprocess.Popen[bytes] | None = None

    def start(self, *more: str, seconds: float = 0.1, break_at: int | None = None) -> Run:
        """Start the command, or start it again; a step takes so many seconds, and that of `break_at` fails."""
        settings = {"seconds": seconds, "break_at": break_at}
        (self.above / f"{self.name}.json").write_text(json.dumps(settings))
        self.call(*FLAGS, "--storage-path", str(self.above), "--run-name", self.name, *self.flags, *more)
        return self

    def call(self, *flags: str) -> None:
        """Start the training command with just these flags."""
        with self.log_file.open("ab") as log:
            self.command = self.nodes.train(*flags, log=log)

    @property
    def above(self) -> Path:
        """The folder of all runs."""
        return Path(self.nodes.environment[FOLDER])

    @property
    def folder(self) -> Path:
        """The run's own."""
        return self.above / self.name

    @property
    def log_file(self) -> Path:
        """What the commands have said."""
        return self.above / f"{self.name}.log"

    @property
    def log(self) -> str:
        """What the commands have said."""
        return self.log_file.read_text()

    @property
    def moments(self) -> list[float]:
        """When each step was made, in seconds of the epoch; those that were lost, too."""
        file = self.above / f"{self.name}.steps"
        lines = file.read_text().splitlines() if file.exists() else []
        return sorted(float(line) for line in lines)[WORKERS - 1 :: WORKERS]

    @property
    def step(self) -> int:
        """The step that the latest checkpoint was taken after: those that were lost don't count."""
        return max((int(each.name.rpartition("_")[2]) for each in self.folder.glob("checkpoint_*")), default=0)

    def wait_for_steps(self, count: int) -> None:
        """Wait until so many steps have been made, but not all."""
        until(lambda: len(self.moments) >= count or self.ended, START_SECONDS)
        if self.ended:
            raise AssertionError(f"it has ended: {self.log}")

    @property
    def ended(self) -> bool:
        """Whether the command has."""
        return self.command is None or self.command.poll() is not None

    def finish(self, seconds: float = END_SECONDS, replace: bool = True) -> int:
        """Wait for the command's end, while nodes that have ended are replaced; its exit status."""

        def ended() -> bool:
            if replace:
                self.nodes.replace_ended()
            return self.ended

        until(ended, seconds)
        return self.command.returncode if self.command else 0

    def read(self, name: str) -> Any:
        """A JSON document of the run."""
        return json.loads((self.folder / name).read_text())

    def ends_as(self, other: Run) -> bool:
        """Whether the weights are the other run's, to the last bit."""
        mine, theirs = (torch.load(each.folder / "model.pt", weights_only=True) for each in (self, other))
        return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())
