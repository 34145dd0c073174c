"""A worker's view of the driver, and of its last files."""

import time
from typing import Any

import pytest

from ray_on_ecs.run import worker as module
from ray_on_ecs.run.group import Directive, FilesStatus, WorkerStatus
from ray_on_ecs.run.worker import ScriptWorker


class Actor:
    """An actor that may not answer."""

    answer: Any = (Directive("group", 0), {})

    def update(self, *given: Any) -> Any:
        return self.answer


class Rounds:
    """Snapshots with an unreachable storage."""

    status = FilesStatus(part=3)

    def poll(self, *given: Any) -> None:
        self.finish()

    def finish(self) -> None:
        raise OSError("503 SlowDown")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> ScriptWorker:
    """A worker without Ray."""
    monkeypatch.setattr(module, "LOST_SECONDS", 0.1)
    worker: Any = object.__new__(ScriptWorker)
    worker._actor, worker._group, worker._rank, worker._local_rank = Actor(), "group", 0, 0
    worker._config = type("Config", (), {"mpi": False})
    worker._member = WorkerStatus("127.0.0.1", 1, 0, generation=0)
    worker._members, worker._directive, worker._unheard_since = {}, None, None
    worker._rounds, worker._node_rank, worker._world_size = Rounds(), 0, 1
    return worker


def test_late_poll_does_not_isolate_a_worker(worker: ScriptWorker) -> None:
    worker._talk()
    time.sleep(0.2)
    assert worker._is_to_run, "it restored many files, or S3 was unreachable"


def test_silent_driver_isolates_a_worker(worker: ScriptWorker) -> None:
    worker._talk()
    worker._actor.answer = None  # ty: ignore[missing-attribute]
    worker._talk()
    assert worker._is_to_run
    time.sleep(0.2)
    worker._talk()
    assert not worker._is_to_run
    worker._actor.answer = Actor.answer
    worker._talk()
    assert worker._is_to_run


@pytest.mark.parametrize(
    ("rank", "mpi", "users", "wanted"),
    [
        (0, False, {}, {"WANDB_RUN_ID": "night-0123abcd", "WANDB_RESUME": "allow"}),
        (1, False, {}, {}),
        (0, True, {}, {}),
        (0, False, {"WANDB_RUN_ID": "mine"}, {}),
        (0, False, {"WANDB_RESUME": "never"}, {}),
    ],
    ids=["rank 0", "rank 1", "mpi", "the user's ID", "the user's mode"],
)
def test_only_rank_0_continues_a_wandb_run(
    worker: Any, rank: int, mpi: bool, users: dict[str, str], wanted: dict[str, str]
) -> None:
    worker._rank, worker._config = rank, type("Config", (), {"mpi": mpi})
    worker._storage, worker._settings = type("Storage", (), {"run_name": "night"}), {"run_id": "0123abcd"}
    assert worker._of_tracker(users) == wanted


def test_wandb_id_has_at_most_64_characters() -> None:
    assert module.wandb_id(128 * "x", "0123abcd") == f"{55 * 'x'}-0123abcd"


def test_unstored_last_files_are_reported(worker: ScriptWorker, capsys: pytest.CaptureFixture[str]) -> None:
    worker._store()
    assert worker._member.not_stored is None
    assert "will be tried again (503 SlowDown)" in capsys.readouterr().out
    worker._store_last()
    assert worker._member.not_stored == "503 SlowDown"
    assert not capsys.readouterr().out
