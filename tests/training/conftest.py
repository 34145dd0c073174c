from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.ranks import Ranks
from training.config import TrainingConfig
from training.data import Dataset, load


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Where something else runs on the machine, threads that wait for each other take a hundred times as long."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load("digits", TrainingConfig())


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., TrainingConfig]:
    """A valid config with the given settings changed."""

    def build(**settings: Any) -> TrainingConfig:
        values: dict[str, Any] = {"dataset": "digits", "storage_path": str(tmp_path), "run_name": "test", **settings}
        return TrainingConfig(**values)

    return build


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Ranks]:
    """Calls a function on several ranks."""
    with Ranks() as ranks:
        yield ranks
