"""A small model whose steps take a set time and are logged, for runs that tests and drills disturb.

It has dropout and batch norm, so a run that resumes from anything but its complete state ends with other weights.
"""

import json
import os
import time
from pathlib import Path

import ray.train
from torch import Tensor, nn

# The nodes' environment variable with the folder of the settings and step logs.
FOLDER_VARIABLE = "SLOW_MODEL_FOLDER"


class SlowModel(nn.Module):
    """Maps images [n, channels, 28, 28] to logits [n, classes].

    In the folder that SLOW_MODEL_FOLDER names, `<run>.json` may hold `seconds`, the duration of a step, and
    `fail_at`, the step of this process that raises ValueError. Each worker appends the Unix time of each of its steps
    to `<run>.steps`.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(channels, 4, 3, stride=3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(324, classes))
        folder, run_name = Path(os.environ[FOLDER_VARIABLE]), ray.train.get_context().get_experiment_name()
        settings = folder / f"{run_name}.json"
        self.settings = json.loads(settings.read_text()) if settings.exists() else {}
        self.step_log = folder / f"{run_name}.steps"
        self.steps = 0

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits; a training step takes its time first."""
        if self.training:
            self._take_time()
        return self.classifier(self.features(images))

    def _take_time(self) -> None:
        self.steps += 1
        if self.steps == self.settings.get("fail_at"):
            print("about to fail", flush=True)
            raise ValueError("this model is broken")
        time.sleep(self.settings.get("seconds", 0.0))
        with self.step_log.open("a") as log:
            log.write(f"{time.time()}\n")
