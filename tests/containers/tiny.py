"""A model with small checkpoints and slow steps, for tests of the cluster."""

import os
import time
from pathlib import Path

from torch import Tensor, nn

# Until this file exists steps sleep, which leaves the cores to the tests.
STEP_SECONDS = 0.25
HURRY = Path(os.environ["HURRY"])


class Slow(nn.Module):
    """Returns its input, after a while."""

    def forward(self, images: Tensor) -> Tensor:
        if self.training and not HURRY.exists():
            time.sleep(STEP_SECONDS)
        return images


def mlp(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(Slow(), nn.Flatten(), nn.Linear(channels * 28 * 28, 64), nn.ReLU(), nn.Linear(64, classes))
