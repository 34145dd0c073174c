"""A worker's view of the driver, of its last files, and its script's variables."""

from pathlib import Path
from typing import Any

import pytest
from ray_on_ecs.run.group_member import GroupMember

from ray_on_ecs.run import group_member
from ray_on_ecs.run.files import node_files
from ray_on_ecs.run.files.node_files import NodeFiles
from ray_on_ecs.run.group import Directive, FilesStatus, WorkerStatus
from ray_on_ecs.storage.run_storage import RunStorage
from tests.lazy import Lazy
from tests.run_folders import Clock

environment_module = Lazy("ray_on_ecs.run.environment")


class Actor:
    """An actor that may not answer."""

    answer: Any = (Directive("group", 0), {})

    def update(self, *arguments: Any) -> Any:
        return self.answer


class Rounds:
    """Snapshots with an unreachable storage."""

    status = FilesStatus(part=3)

    def __init__(self, *arguments: Any) -> None:
        pass

    def poll(self, *arguments: Any) -> None:
        self.finish()

    def finish(self) -> None:
        raise OSError("503 SlowDown")


@pytest.fixture
def actor() -> Actor:
    return Actor()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(group_member, "time", clock)
    return clock


@pytest.fixture
def member(actor: Any, clock: Clock) -> GroupMember:
    """The only worker of a group whose scripts run."""
    member = GroupMember(actor, "group", 0, WorkerStatus("127.0.0.1", 1, 0))
    member.begin(0)
    return member


def test_late_poll_does_not_isolate_a_worker(member: GroupMember, clock: Clock) -> None:
    member.report(None)
    clock.now += group_member.LOST_SECONDS + 1
    assert member.is_to_run, "it restored many files, or S3 was unreachable"


def test_silent_driver_isolates_a_worker(member: GroupMember, actor: Actor, clock: Clock) -> None:
    member.report(None)
    actor.answer = None
    member.report(None)
    assert member.is_to_run
    clock.now += group_member.LOST_SECONDS + 1
    member.report(None)
    assert not member.is_to_run
    actor.answer = Actor.answer
    member.report(None)
    assert member.is_to_run


def test_only_workers_of_the_same_start_count(member: GroupMember, actor: Actor) -> None:
    workers = {rank: WorkerStatus("127.0.0.1", 1, 0, generation=rank) for rank in range(2)}
    actor.answer = (Directive("group", 0), workers)
    member.report(None, wants_statuses=True)
    assert member.statuses == {0: workers[0]}
    member.begin(1)
    member.report(None, wants_statuses=True)
    assert member.statuses == {1: workers[1]}


@pytest.mark.parametrize(
    ("rank", "mpi", "users", "expected"),
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
    tmp_path: Path, rank: int, mpi: bool, users: dict[str, str], expected: dict[str, str]
) -> None:
    config: Any = type("Config", (), {"mpi": mpi, "variables": users})
    environment = environment_module.ScriptEnvironment(
        config=config,
        storage=RunStorage.open(str(tmp_path), "night"),
        run_id="0123abcd",
        folder=tmp_path,
        python="python",
        secrets={},
        inputs={},
        git={},
    )
    assert environment.wandb_variables(rank) == expected


def test_wandb_id_has_at_most_64_characters() -> None:
    assert environment_module.wandb_id(128 * "x", "0123abcd") == f"{55 * 'x'}-0123abcd"


def test_unstored_last_files_are_reported(
    member: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_files, "SnapshotRounds", Rounds)
    unused: Any = None
    files = NodeFiles(unused, unused, member, is_mpi=False)
    files.begin()
    files.store()
    assert member.status.not_stored is None
    assert "will be tried again (503 SlowDown)" in capsys.readouterr().out
    files.store_last()
    assert member.status.not_stored == "503 SlowDown"
    assert not capsys.readouterr().out
