"""A small model that takes its time and notes each of its training steps, for runs that are disturbed.

It draws on chance and has running statistics, so that a run which goes on from anything but the whole state ends with
other weights.
"""

import json
import os
import time
from pathlib import Path

import ray.train
from torch import Tensor, nn

FOLDER = "SLOW_FOLDER"


class Slow(nn.Module):
    """Takes [n, channels, 28, 28] and gives [n, classes].

    In the folder that the nodes' variable SLOW_FOLDER names, `<run>.json` may have `seconds`, what a step takes, and
    `break_at`, the step of this process that fails; a line for each step goes to `<run>.steps`: its time.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, 4, 3, stride=3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.last = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(324, classes))
        folder, name = Path(os.environ[FOLDER]), ray.train.get_context().get_experiment_name()
        self.steps, self.notes, settings = 0, folder / f"{name}.steps", folder / f"{name}.json"
        self.settings = json.loads(settings.read_text()) if settings.exists() else {}

    def forward(self, images: Tensor) -> Tensor:
        """The logits, a little later."""
        if self.training:
            self._take_time()
        return self.last(self.first(images))

    def _take_time(self) -> None:
        self.steps += 1
        if self.steps == self.settings.get("break_at"):
            print("about to break", flush=True)
            raise ValueError("this model is broken")
        time.sleep(self.settings.get("seconds", 0.0))
        with self.notes.open("a") as notes:
            notes.write(f"{time.time()}\n")
