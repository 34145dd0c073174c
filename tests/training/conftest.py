import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

from tests.training.ranks import Ranks
from training.config import TrainingConfig
from training.data import Dataset, load

Run = subprocess.CompletedProcess[str]
BUCKET = "runs-of-the-tests"
REPOSITORY = Path(__file__).parents[2]

# A model of a user's own, small enough to train in seconds.
OWN_MODEL = """
from torch import nn

def build(channels, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 28 * 28, classes))

def broken(channels, classes):
    return nn.Linear(3, classes)
"""


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


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a command: a Ray cluster of its own, a short path to its sockets, and a user's model."""
    home = tmp_path_factory.mktemp("home")
    (home / "own.py").write_text(OWN_MODEL)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINING_", "RAY_", "AWS_"))}
    path = f"{home}{os.pathsep}{REPOSITORY}"
    return {**kept, "RAY_ADDRESS": "local", "RAY_TMPDIR": "/tmp/ray-tests", "PYTHONPATH": path, "COLUMNS": "100"}


@pytest.fixture(scope="session")
def start(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.Popen[str]]:
    """Start `python -m training` with these arguments, in a folder of its own."""
    folder = tmp_path_factory.mktemp("work")

    def popen(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "training", *arguments],
            cwd=folder,
            env={**environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return popen


@pytest.fixture(scope="session")
def train(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., Run]:
    """Run `python -m training` to its end."""

    def run(*arguments: str, **variables: str) -> Run:
        process = start(*arguments, **variables)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


@pytest.fixture(scope="session")
def s3_client(aws_server: str) -> Any:
    client = boto3.client(
        "s3", endpoint_url=aws_server, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
    )
    client.create_bucket(Bucket=BUCKET)
    return client


@pytest.fixture(scope="session")
def cloudwatch_client(aws_server: str) -> Any:
    return boto3.client(
        "cloudwatch",
        endpoint_url=aws_server,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
