"""A recipe: how to prepare its settings, how to build a trainer, and the names of its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from training.engine.feed import Feed
from training.engine.trainer import Trainer


@dataclass(frozen=True)
class Quality:
    """A measure that the metrics hold as `train_<name>` and `test_<name>`.

    Attributes:
        name: Its name in the metrics, such as "loss".
        unit: The label of its axis in a plot.
    """

    name: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One kind of training.

    Attributes:
        name: What it trains, in a word.
        prepare: Checks a config as far as possible without a cluster and returns it with the data set resolved. Raises
            UsageError.
        build: Builds this rank's trainer from a config, a device, and what prepares its data.
        describe: Returns lines of the header by their label, from the config as requested and as resolved.
        qualities: The measures of its metrics, the loss first.
        score: The metric that decides which checkpoint is the best; higher is better.
        scalars: Metrics for TensorBoard that only this recipe has, by their tags.
        files: Makes, at the end of a run, the files of its folder that only this recipe has: yields their names and
            contents, which count on rank 0. Every rank must call it.
    """

    name: str
    prepare: Callable[[Any], Any]
    build: Callable[[Any, torch.device, Feed], Trainer]
    describe: Callable[[Any, Any], dict[str, str]]
    qualities: tuple[Quality, ...]
    score: str
    scalars: Mapping[str, str]
    files: Callable[[Any], Iterable[tuple[str, bytes]]]

    def best(self, history: Sequence[Any]) -> Any:
        """Return the metrics of the epoch with the highest score, the earliest of several."""
        return max(history, key=lambda metrics: metrics[self.score])
