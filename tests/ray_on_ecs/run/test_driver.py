"""The last lines of a run, and the ends with which its secrets are deleted."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from ray_on_ecs import secrets
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import Interrupted, ResourceError, TrainingError, UsageError
from ray_on_ecs.run import admission, driver
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.lock import HeldError
from ray_on_ecs.tracking.storage import RunStorage


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ((), ""),
        (("TERMINATED",), ""),
        (
            ("ERROR", "TERMINATED", "ERROR"),
            "2 of 3 trials failed: trials.json says which, and error.txt in a trial's folder why\n",
        ),
    ],
    ids=["no sweep", "all well", "failed"],
)
def test_failed_trials_are_counted_in_the_last_line(
    statuses: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = RunStorage.open(str(tmp_path), "sweep")
    if statuses:
        storage.write_json(layout.TRIALS, {str(number): {"status": each} for number, each in enumerate(statuses)})
    driver._print_failed_trials(storage, Console(width=40))
    assert capsys.readouterr().out == said


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
def test_secrets_stay_where_the_run_may_go_on(
    end: BaseException | None,
    stays_of_job: bool,
    stays_by_hand: bool,
    is_job: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    storage = RunStorage.open(str(tmp_path / "runs"), "mine")
    if is_job:
        secrets.store(storage.uri).put({"TOKEN": "value"})
    values = {} if is_job else {"TOKEN": "value"}
    with (
        pytest.raises(type(end)) if end else nullcontext(),
        admission._secrets_till_end(RunConfig(secret=("TOKEN",)), storage, values, is_job),
    ):
        assert secrets.read(["TOKEN"], storage.uri) == {"TOKEN": "value"}
        if end:
            raise end
    assert bool(secrets.store(storage.uri).read(["TOKEN"])) == (stays_of_job if is_job else stays_by_hand)


def test_a_run_without_secrets_touches_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with admission._secrets_till_end(RunConfig(), RunStorage.open(str(tmp_path), "mine"), {}, False):
        pass
    assert not list(tmp_path.iterdir())
