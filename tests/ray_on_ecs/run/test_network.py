"""Measurement of the network by workers on two nodes: real processes with Gloo, and parts that fail or hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.run import network
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.run.group import Directive, NetworkStatus, Peer, Place, WorkerRank, WorkerStatus
from ray_on_ecs.run.homes import launcher_of
from ray_on_ecs.run.network import Part, part_of
from ray_on_ecs.run.worker import ScriptWorker, Settings
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from tests.waiting import until

SCRIPT = "open('begun', 'w').close()"
HANGS = "import time; time.sleep(1e6)"


class TwoNodes:
    """A worker on each of two nodes of this machine, which a test directs."""

    def __init__(self, folder: Path) -> None:
        config = RunConfig(command=("train.py",), storage_path=str(folder), run_name="mine", num_workers=2)
        storage = RunStorage.open(str(folder), "mine")
        storage.write_json(layout.SETTINGS, {})
        settings = Settings(
            config=config,
            storage=storage,
            threads=1,
            use_gpu=False,
            code=Code(name="code", archive=""),
            is_one_node=False,
            run_id="first",
            inputs={},
            cluster="",
            launcher=launcher_of(config),
        )
        self.directive = Directive()
        self.polls = 0
        ranks = [WorkerRank(rank, 2, 0, 1, rank) for rank in range(2)]
        self.workers = [
            ScriptWorker(settings, rank, Place(node_id=f"node-{rank.rank}", shares_machine=True)) for rank in ranks
        ]
        self.threads = [threading.Thread(target=worker.run, daemon=True) for worker in self.workers]
        for thread in self.threads:
            thread.start()

    def say(self, **changes: Any) -> None:
        self.directive = replace(self.directive, **changes)

    def poll(self) -> list[WorkerStatus]:
        self.polls += 1
        statuses = [worker.exchange.poll(self.polls, self.directive, -1, 0.0)[1] for worker in self.workers]
        assert not any(status.error for status in statuses), [status.where for status in statuses]
        return statuses

    def meet(self) -> None:
        """Let the workers measure once they have met."""
        until(lambda: all(status.peer for status in self.poll()))
        self.say(peers=tuple(status.peer for status in self.poll()), measures=True)

    def measured(self) -> list[NetworkStatus]:
        """Wait until all have measured, or have failed."""

        def ended() -> list[NetworkStatus] | None:
            parts = [status.network for status in self.poll()]
            return [part for part in parts if part] if all(part and part.has_ended for part in parts) else None

        return until(ended)

    def leave(self) -> None:
        self.say(action="leave", ended=frozenset({0, 1}))
        until(lambda: all(status.has_left for status in self.poll()))


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoNodes]:
    def place(code: Code, folder: Path) -> None:
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)

    monkeypatch.setattr(Code, "place", place)
    nodes = TwoNodes(tmp_path)
    yield nodes
    nodes.leave()


def replace_probe(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    probe = folder / "probe.py"
    probe.write_text(text)
    monkeypatch.setattr(network, "PROBE", probe)


def test_two_nodes_measure_before_their_scripts(nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "BYTES", 2**20)
    nodes.meet()
    parts = nodes.measured()
    assert [part.failure for part in parts] == ["", ""]
    assert all(part.seconds > 0 for part in parts)
    assert {part.transport and part.transport.library for part in parts} == {"Gloo"}
    assert not any(status.started_at for status in nodes.poll())
    nodes.say(measures=False)
    until(lambda: all(status.started_at for status in nodes.poll()))


def test_scripts_start_though_the_measurement_hangs(
    nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_probe(monkeypatch, tmp_path, HANGS)
    nodes.meet()
    until(lambda: all(status.network for status in nodes.poll()))
    assert not any(status.started_at or status.network.has_ended for status in nodes.poll() if status.network)
    nodes.say(measures=False)
    until(lambda: all(status.started_at for status in nodes.poll()))


def test_measurement_ends_with_the_start(nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_probe(monkeypatch, tmp_path, HANGS)
    nodes.meet()
    until(lambda: all(status.network for status in nodes.poll()))
    nodes.say(action="end", ended=frozenset({0, 1}))
    until(lambda: all(status.is_stored for status in nodes.poll()))
    assert not any(status.started_at for status in nodes.poll())


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("import torch_of_another_framework", "ModuleNotFoundError: No module named 'torch_of_another_framework'"),
        ("raise SystemExit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "exit status -9"),
    ],
)
def test_failure_of_a_measurement_is_not_one_of_the_worker(
    nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: str, reason: str
) -> None:
    replace_probe(monkeypatch, tmp_path, probe)
    nodes.meet()
    assert all(reason in part.failure for part in nodes.measured())
    nodes.say(measures=False)
    until(lambda: all(status.started_at for status in nodes.poll()))


def test_full_disk_is_not_a_failure_of_the_worker(nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(network, "ScriptProcess", fail)
    nodes.meet()
    assert [part.failure for part in nodes.measured()] == ["[Errno 28] No space left on device"] * 2
    monkeypatch.undo()


def test_each_gpu_or_node_has_a_part() -> None:
    peers = [Peer(f"10.0.0.{node}", 7000 + node, node) for node in (0, 0, 1, 1)]
    ranks = [WorkerRank(rank, 4, rank % 2, 2, rank // 2) for rank in range(4)]
    on_gpus = [part_of(rank, peers, use_gpu=True) for rank in ranks]
    assert on_gpus == [Part("10.0.0.0", 7000, rank, 4, rank % 2) for rank in range(4)]
    on_cpus = [part_of(rank, peers, use_gpu=False) for rank in ranks]
    assert on_cpus == [Part("10.0.0.0", 7000, 0, 2, -1), None, Part("10.0.0.0", 7000, 1, 2, -1), None]
