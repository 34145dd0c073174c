"""The ends of a run with which its secrets are deleted."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from ray_on_ecs import secrets
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import Interrupted, ResourceError, TrainingError, UsageError
from ray_on_ecs.run import run_secrets
from ray_on_ecs.storage.lock import HeldError
from ray_on_ecs.storage.run_storage import RunStorage


@pytest.mark.parametrize(
    ("end", "stays"),
    [
        (None, False),
        (TrainingError("failed"), False),
        (UsageError("a mistake"), False),
        (ResourceError("no workers"), False),
        (Interrupted("the head stops"), True),
        (KeyboardInterrupt(), True),
        (HeldError("another command has the run"), True),
        (RuntimeError("the head is lost"), True),
    ],
    ids=["finished", "failed", "mistake", "no workers", "interrupted", "signal", "held", "lost"],
)
def test_secrets_stay_while_the_run_can_continue(
    end: BaseException | None, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    storage = RunStorage.open(str(tmp_path / "runs"), "mine")
    config = RunConfig(secret=("TOKEN",))
    secrets.store(storage.uri).put({"TOKEN": "value"})
    with pytest.raises(type(end)) if end else nullcontext(), run_secrets.till_end(config, storage):
        assert secrets.read(["TOKEN"], storage.uri) == {"TOKEN": "value"}
        if end:
            raise end
    assert bool(secrets.store(storage.uri).read(["TOKEN"])) == stays


def test_run_without_secrets_uses_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with run_secrets.till_end(RunConfig(), RunStorage.open(str(tmp_path), "mine")):
        pass
    assert not list(tmp_path.iterdir())


def test_resumed_run_needs_its_secrets_again() -> None:
    arn = "arn:aws:secretsmanager:us-west-2:123456789012:secret:b"
    earlier = {"secret": ["A", f"B={arn}"]}
    run_secrets.check_repeated(RunConfig(secret=("B", "A", "C")), earlier)
    with pytest.raises(UsageError, match=f"'mine' was started with --secret B={arn}; type it again, or use"):
        run_secrets.check_repeated(RunConfig(run_name="mine", secret=("A",)), earlier)
    run_secrets.check_repeated(RunConfig(), {})
