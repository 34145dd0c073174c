"""The fixtures of tests/training, which the tests of the checkpoints share, and the log."""

import logging

import pytest

from ray_on_ecs import logs
from tests.training.conftest import on_ranks, s3

__all__ = ["on_ranks", "own_log", "s3"]


@pytest.fixture(autouse=True)
def own_log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of the command that the test file names in COMMAND_NAME, at its default level."""
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    is_of_node = request.path.parent.name == "node"
    name = getattr(request.module, "COMMAND_NAME", "")
    logs.set_up(name, errors_from=logging.WARNING if is_of_node else logging.ERROR)
    logs.mask_by(str)
