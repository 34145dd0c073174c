"""Files of a failed run; tests/faults has whole runs."""

import shlex
from pathlib import Path

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import TrainingError
from ray_on_ecs.run.failure_policy import Raise
from ray_on_ecs.storage.run_storage import RunStorage
from tests.lazy import Lazy
from tests.settings import parse

failure_report = Lazy("ray_on_ecs.run.failure_report")


def test_failure_outside_the_workers_has_no_rank() -> None:
    cause = ValueError("no")
    assert failure_report._first_cause(failure_report.WorkerGroupError("failed", {2: ValueError("b"), 1: cause})) == (
        1,
        cause,
    )
    assert failure_report._first_cause(failure_report.ControllerError(cause)) == (None, cause)


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunConfig, RunStorage]:
    config = RunConfig(storage_path=str(tmp_path), run_name="failed", hang_timeout=600.0)
    return config, RunStorage.open(config.storage_path, "failed")


def test_stacks_of_all_ranks_are_stored(run: tuple[RunConfig, RunStorage]) -> None:
    folder = failure_report.store_stacks({0: "waits in all_reduce", 1: ""}, run[1])
    stored = {each.name: each.read_text() for each in Path(folder).iterdir()}
    assert stored == {"rank_0.txt": "waits in all_reduce", "rank_1.txt": failure_report.NO_STACKS}


def test_dead_worker_is_named_with_its_last_log() -> None:
    workers = [failure_report.WorkerDump(0), failure_report.WorkerDump(1, ["its last line"])]
    failure = failure_report.describe_failure(
        failure_report.WorkerGroupError("failed", {1: failure_report.RayActorError()}), workers
    )
    assert str(failure).startswith("training failed on rank 1: a process of the run ended")
    assert failure.log == ("its last line",)


def test_error_names_file_and_command_to_continue(run: tuple[RunConfig, RunStorage]) -> None:
    config, storage = run
    failure = failure_report.describe_failure(failure_report.WorkerGroupError("failed", {0: ValueError("no")}), [])
    error = failure_report.write_error(failure, Raise(TrainingError, str(failure)), config, storage)
    assert str(error) == (
        f"training failed on rank 0: ValueError: no; see {storage.uri}/error.json; continue with --run-name failed"
    )
    document = storage.read_json("error.json")
    assert (document["what"], document["rank"]) == ("ValueError: no", 0)
    assert document["log"] == ["the worker's node is gone"]


def test_command_to_continue_has_only_changed_settings() -> None:
    flags = ["--run-name", "mine", "--keep-gib", "5", "--num-workers", "1:2", "--storage-path", "s3://bucket/my runs"]
    command = shlex.join(parse([*flags, "train.py", "--epochs", "5"]).command_line({}))
    assert "--keep-gib 5" in command
    assert "--storage-path 's3://bucket/my runs'" in command
    assert "--max-restarts" not in command
    assert command.endswith(" train.py --epochs 5")
    assert RunConfig(command=("train.py",)).command_line({}) == ["train.py"]
