"""The ends of a run with which its secrets are deleted."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from ray_on_ecs import secrets
from ray_on_ecs.config import JOB_VARIABLE, RunConfig
from ray_on_ecs.errors import Interrupted, ResourceError, TrainingError, UsageError
from ray_on_ecs.run import run_secrets
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.lock import HeldError
from ray_on_ecs.storage.run_storage import RunStorage


@pytest.mark.parametrize(
    ("end", "stays_of_job", "stays_by_hand"),
    [
        (None, False, False),
        (TrainingError("failed"), False, False),
        (UsageError("a mistake"), False, False),
        (ResourceError("no workers"), False, False),
        (Interrupted("the head stops"), True, False),
        (KeyboardInterrupt(), True, False),
        (HeldError("another command has the run"), True, True),
        (RuntimeError("the head is lost"), True, False),
    ],
    ids=["finished", "failed", "mistake", "no workers", "interrupted", "signal", "held", "lost"],
)
@pytest.mark.parametrize("is_job", [True, False], ids=["job", "by hand"])
def test_secrets_stay_while_the_run_can_continue(
    end: BaseException | None,
    stays_of_job: bool,
    stays_by_hand: bool,
    is_job: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    storage = RunStorage.open(str(tmp_path / "runs"), "mine")
    config = RunConfig(secret=("TOKEN",))
    if is_job:
        monkeypatch.setenv(JOB_VARIABLE, "{}")
        secrets.store(storage.uri).put({"TOKEN": "value"})
    else:
        monkeypatch.delenv(JOB_VARIABLE, raising=False)
        monkeypatch.setenv("TOKEN", "value")
    with (
        pytest.raises(type(end)) if end else nullcontext(),
        run_secrets.till_end(config, storage, run_secrets.take(config)),
    ):
        assert secrets.read(["TOKEN"], storage.uri) == {"TOKEN": "value"}
        if end:
            raise end
    assert bool(secrets.store(storage.uri).read(["TOKEN"])) == (stays_of_job if is_job else stays_by_hand)


def test_run_without_secrets_uses_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with run_secrets.till_end(RunConfig(), RunStorage.open(str(tmp_path), "mine"), {}):
        pass
    assert not list(tmp_path.iterdir())


def test_resumed_run_needs_its_secrets_again(tmp_path: Path) -> None:
    storage = RunStorage.open(str(tmp_path), "mine")
    arn = "arn:aws:secretsmanager:us-west-2:123456789012:secret:b"
    settings = RunConfig(secret=("A", f"B={arn}")).to_dict()
    storage.write_json(layout.SETTINGS, {"format": layout.FORMAT, "settings": settings})
    run_secrets.check_repeated(RunConfig(secret=("B", "A", "C")), storage)
    with pytest.raises(UsageError, match=f"'mine' was started with --secret B={arn}; type it again, or use"):
        run_secrets.check_repeated(RunConfig(secret=("A",)), storage)


def test_new_run_may_lack_secrets(tmp_path: Path) -> None:
    run_secrets.check_repeated(RunConfig(), RunStorage.open(str(tmp_path), "new"))
