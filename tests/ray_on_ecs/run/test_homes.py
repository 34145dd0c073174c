"""Groups of a run's workers: each waits for the nodes of its node group, and after a loss anew."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.run import homes, worker_group
from ray_on_ecs.run.allocation import WorkerAllocation
from ray_on_ecs.run.homes import RayCluster
from ray_on_ecs.run.receipt import InstanceNetwork
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.run_record import RunRecord
from tests.log_lines import collect_lines

CONFIG = RunConfig(num_workers=2)
FIRST, SECOND = WorkerAllocation(2, True, 4), WorkerAllocation(2, True, 96)


class Choice:
    """The choice of a run; `calls` has the waits that begin and end."""

    kind = "h100-workers"
    moves = False
    info: Any

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wait_anew(self) -> None:
        self.calls.append("anew")

    def move_on(self, seconds: float, *, has_nodes: bool) -> bool:
        self.calls.append(f"on after {seconds:.0f} s")
        return self.moves


@pytest.fixture
def choice() -> Choice:
    return Choice()


@pytest.fixture
def home(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A home after its first wait, whose next waits find `SECOND`."""
    monkeypatch.setattr(homes, "replace", lambda settings, threads: SimpleNamespace(threads=threads))
    monkeypatch.setattr(worker_group, "RayGroup", lambda settings, allocation, seconds: (settings.threads, allocation))
    home: Any = RayCluster.__new__(RayCluster)
    home.waits = []

    def wait_for_workers(config: RunConfig, seconds: float, waiting: Any, choice: Any, before: Any) -> Any:
        with waiting():
            home.waits.append((seconds, before))
        return SECOND

    home._choice, home._config, home._seconds, home._is_waiting = choice, CONFIG, 60.0, True
    home._of_ray = SimpleNamespace(wait_for_workers=wait_for_workers, has_nodes=lambda allocation: home.has_nodes)
    home._record = SimpleNamespace(note_waiting=lambda is_waiting: None)
    home.has_nodes, home.allocation = True, FIRST
    return home


def test_each_group_but_the_first_begins_a_wait(home: Any, choice: Choice) -> None:
    assert [home.new_group(None) for _ in range(2)] == [(96, SECOND)] * 2
    assert home.waits == [(60.0, FIRST), (60.0, SECOND)]
    assert choice.calls == ["anew"]


@pytest.mark.parametrize("moves", [False, True])
def test_workers_on_nodes_in_use_wait_on_or_move(home: Any, choice: Choice, moves: bool) -> None:
    choice.moves = moves
    home.new_group(None)
    assert home.is_busy() is not moves
    home.new_group(None)
    assert choice.calls == ["on after 60 s"], "the wait goes on"


def test_lost_nodes_are_not_busy(home: Any, choice: Choice) -> None:
    home.has_nodes = False
    assert not home.is_busy()
    home.new_group(None)
    assert choice.calls == ["anew"]


def test_run_without_a_stack_has_no_choice(home: Any) -> None:
    assert home.kinds() == ("h100-workers",)
    home._choice = None
    assert home.is_busy()
    assert home.kinds() == ("workers",)
    assert home.network_of({"a"}) == InstanceNetwork()


def test_run_without_room_in_any_queue_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = iter([False, False, False, True])
    choice = SimpleNamespace(begin=lambda has_room: next(begun))
    monkeypatch.setattr(homes, "PoolChoice", lambda *given: choice)
    monkeypatch.setattr(homes, "POLL_SECONDS", 0.0)
    record = RunRecord(RunStorage.open(str(tmp_path), "mine"), RunConfig(run_name="mine"))
    lines, admitted = collect_lines(), SimpleNamespace(document=Mock(), record=record, info={}, kinds=["a"], place="")
    assert homes._choice_of(cast("Any", admitted)) is choice
    assert lines == ["waiting: other runs use the pools that can hold this one"]
    assert record.status()["state"] == "waiting"


@pytest.mark.parametrize(
    ("types", "found"),
    [
        (["p4d.24xlarge"], InstanceNetwork(("p4d.24xlarge",), 4, 400.0)),
        (["p4d.24xlarge", "p4de.24xlarge"], InstanceNetwork(("p4d.24xlarge", "p4de.24xlarge"), 4, 300.0)),
        (["g99.xlarge"], InstanceNetwork(("g99.xlarge",), 4, None)),
        ([], InstanceNetwork(("p4d.24xlarge",), 4, 400.0)),  # Ray does not answer
    ],
)
def test_network_of_the_nodes_is_that_of_their_types(
    home: Any, choice: Choice, types: list[str], found: InstanceNetwork
) -> None:
    groups = {"h100-workers": {"types": ["p4d.24xlarge"], "efa": 4}}
    choice.info = {"groups": groups, "network_gbits": {"p4d.24xlarge": 400.0, "p4de.24xlarge": 300.0}}
    home._of_ray.types_of = lambda node_ids: types
    assert home.network_of({"a", "b"}) == found


def test_network_without_efa_and_bandwidth_has_the_types(home: Any, choice: Choice) -> None:
    choice.info = {"groups": {"h100-workers": {"types": ["p5.48xlarge"]}}, "network_gbits": {}}
    home._of_ray.types_of = lambda node_ids: ["p5.48xlarge"]
    assert home.network_of({"a"}) == InstanceNetwork(("p5.48xlarge",))
