"""What is said of a run that failed; test_failures.py has whole ones."""

from pathlib import Path

import pytest
from ray.exceptions import RayActorError
from ray.train import ControllerError, WorkerGroupError
from rich.console import Console

from training.config import parse
from training.monitoring import failure_report
from training.monitoring.run_state import RunState
from training.monitoring.watchdog import Watchdog
from training.recipes.images.config import ImageConfig
from training.run.storage import RunStorage

CLOSED = RuntimeError(
    "[pair.cc:545] Read error: Connection closed by peer. This is typically caused by a remote worker"
)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ({0: CLOSED, 1: ValueError("broken")}, 1),
        ({0: ValueError("broken"), 1: CLOSED}, 0),
        ({1: CLOSED, 2: CLOSED}, 1),
        ({2: ValueError("a"), 1: ValueError("b")}, 1),
    ],
)
def test_the_rank_that_failed_first_is_told_from_those_that_lost_it(failures: dict[int, Exception], rank: int) -> None:
    assert failure_report._cause(WorkerGroupError("workers failed", failures)) == (rank, failures[rank])


def test_a_failure_of_no_worker_has_no_rank() -> None:
    cause = ValueError("no")
    assert failure_report._cause(ControllerError(cause)) == (None, cause)


@pytest.mark.parametrize(("starts", "what"), [(1, "no step for 600 s, 1 times"), (2, "the worker's process ended")])
def test_a_stall_that_was_got_over_is_not_why_a_run_failed(
    starts: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ImageConfig(storage_path=str(tmp_path), run_name="stalled")
    storage = RunStorage.open(str(tmp_path), "stalled")
    stalls = Watchdog(None, 600, storage, Console())
    stalls.found, stalls.worker_group_starts = ["stalls/first"], 1
    monkeypatch.setattr(failure_report, "read_run_state", lambda run_state: RunState(worker_group_starts=starts))
    error = failure_report.describe_failure(
        WorkerGroupError("failed", {1: RayActorError()}), config, storage, None, stalls
    )
    assert what in str(error)
    assert storage.read_json("error.json")["stacks"] == ["stalls/first"]


def test_the_command_to_go_on_says_what_is_not_the_default() -> None:
    given = ["--run-name", "mine", "--epochs", "5", "--num-workers", "1:2", "--storage-path", "s3://bucket/my runs"]
    command = failure_report.command(parse(ImageConfig, given, {}))
    assert command.startswith("python -m training ")
    assert "--epochs 5" in command
    assert "--storage-path 's3://bucket/my runs'" in command
    assert "--batch-size" not in command
    assert failure_report.command(ImageConfig()) == "python -m training"
