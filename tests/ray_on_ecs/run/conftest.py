"""The storages of the tests of a run's folder, and their clock."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.run.files import folder as run_folder
from ray_on_ecs.run.files import scan
from ray_on_ecs.storage.run_storage import RunStorage
from tests.aws import BUCKET, environment
from tests.run_folders import Clock, Nodes, Start


@pytest.fixture(params=["disk", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStorage:
    """The folder of a run, on a disk and in S3."""
    if request.param == "disk":
        return RunStorage.open(str(tmp_path / "storage"), "mine")
    for name, value in environment(request.getfixturevalue("aws_server")).items():  # the tests inject faults
        monkeypatch.setenv(name, value)
    request.getfixturevalue("s3_client")
    return RunStorage.open(f"s3://{BUCKET}/folders", re.sub(r"\W+", "-", request.node.name))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (run_folder, scan):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def start(storage: RunStorage, tmp_path: Path, clock: Clock) -> Start:
    """Start a run's nodes, each on an empty disk."""
    number = itertools.count()

    def start(count: int = 1, *, on: RunStorage | None = None, **options: Any) -> Nodes:
        return Nodes(on or storage, tmp_path / f"disks{next(number)}", clock, count, **options)

    return start
