"""Measurement of the network before the scripts start, in the driver's story with simulated workers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.errors import EfaError, Interrupted
from ray_on_ecs.run import receipt
from ray_on_ecs.run.group import Directive, NetworkStatus, Place
from ray_on_ecs.run.nccl_log import Transport
from ray_on_ecs.run.receipt import LIMIT_SECONDS, InstanceNetwork
from tests.ray_on_ecs.run.test_driver import Run, SimulatedHome, Workers, clock, give_notice, lose, stop
from tests.run_folders import Clock
from tests.waiting import until

__all__ = ["clock"]  # a fixture

EFA, SOCKETS = Transport("NCCL", "EFA", 4), Transport("NCCL", "sockets", 1, ("eth0",), "its plugin found no EFA device")


class Measuring(Workers):
    """Workers that measure as long as the driver wants it.

    Attributes:
        part: The status of each worker's part.
        measured: How often they began to measure.
    """

    def __init__(self, part: NetworkStatus | None = None) -> None:
        super().__init__()
        self.part = part
        self.measured: set[int] = set()

    def _follow(self, rank: int, directive: Directive) -> None:
        if directive.measures and directive.action == "run":
            self.measured.add(directive.generation)
            self.tell(rank, network=self.part)
        else:
            super()._follow(rank, directive)


class NetworkRun(Run):
    """A run on two nodes with EFA."""

    workers: Measuring

    def __init__(self, folder: Path, part: NetworkStatus | None, **settings: Any) -> None:
        super().__init__(folder, network_check="on", **settings)
        self.workers = Measuring(part)


@pytest.fixture(autouse=True)
def efa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedHome, "network_of", lambda *_: InstanceNetwork(("p4d.24xlarge",), 4, 400.0))


def begin(folder: Path, part: NetworkStatus | None = None, **settings: Any) -> NetworkRun:
    """Return a run whose workers have been told to measure."""
    run = NetworkRun(folder, part, **settings)
    run.step()
    assert run.told.measures
    return run


def kept(run: Run) -> Any:
    """Return the receipt in run.json, which is written beside the start."""
    return until(lambda: (run.storage.read_json("run.json") or {}).get("network"), between=0.01)


def done(transport: Transport = EFA) -> NetworkStatus:
    return NetworkStatus(transport, 0.01, has_ended=True)


@pytest.fixture
def receipt_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(receipt, "time", clock)
    return clock


def test_scripts_start_once_the_network_is_measured(tmp_path: Path) -> None:
    run = begin(tmp_path, NetworkStatus())
    run.step(5)
    assert run.state == "starting"
    run.workers.part = done()
    run.until("running")
    assert next(line for line in run.lines if "network" in line) == "measuring the network between the nodes"
    assert any("NCCL uses EFA (4 interfaces)" in line for line in run.lines)
    assert kept(run)["transport"] == "EFA"


def test_efa_that_is_not_used_is_a_warning(tmp_path: Path) -> None:
    run = begin(tmp_path, done(SOCKETS))
    run.until("running")
    assert any("the instances have EFA (4 interfaces), and NCCL uses sockets (eth0)" in line for line in run.lines)
    assert "EFA" in kept(run)["warning"]


def test_restart_on_the_same_nodes_measures_nothing(tmp_path: Path) -> None:
    run = begin(tmp_path, done())
    run.until("running")
    run.workers.fail()
    assert run.decide()
    run.until("running")
    assert run.workers.measured == {0}


@pytest.mark.parametrize("part", [None, NetworkStatus(), NetworkStatus(EFA)])
@pytest.mark.parametrize("settings", [{}, {"require_efa": True}])
def test_measurement_that_hangs_delays_the_scripts_only(
    tmp_path: Path, receipt_clock: Clock, part: NetworkStatus | None, settings: dict[str, Any]
) -> None:
    run = begin(tmp_path, part, **settings)
    run.step(5)
    assert run.state == "starting"
    receipt_clock.now += LIMIT_SECONDS
    run.until("running")
    assert any("it did not end within 60 s" in line for line in run.lines)


@pytest.mark.parametrize("settings", [{}, {"require_efa": True}])
def test_measurement_that_fails_ends_no_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = begin(tmp_path, NetworkStatus(failure="RuntimeError: x", has_ended=True), **settings)
    run.until("running")
    assert any("not measured: rank 0: RuntimeError: x; --network-check off" in line for line in run.lines)


def test_missing_torch_is_in_the_document_only(tmp_path: Path) -> None:
    failure = "ModuleNotFoundError: No module named 'torch'"
    run = begin(tmp_path, NetworkStatus(failure=failure, has_ended=True))
    run.until("running")
    assert not any("torch" in line for line in run.lines)
    assert failure in kept(run)["failure"]


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_required_efa_that_is_not_used_ends_the_run(tmp_path: Path, seconds: float) -> None:
    failure = "" if seconds else "RuntimeError: x"  # of the all-reduce, once NCCL has chosen
    run = begin(tmp_path, NetworkStatus(SOCKETS, seconds, failure, has_ended=True), require_efa=True)
    with pytest.raises(EfaError, match=r"--require-efa: NCCL uses sockets \(eth0\), not EFA \(its plugin") as raised:
        run.driver._direct(run.workers)
    assert raised.value.exit_status == 5
    assert str(raised.value).endswith("the script was not started; see docs/efa.md, or leave --require-efa out")
    assert not any(worker.started_at for worker in run.workers.statuses.values())
    document = run.storage.read_json("run.json")
    assert document
    assert document["network"]["transport"] == "sockets"  # before the run ends


def test_efa_that_a_later_node_lacks_ends_the_run(tmp_path: Path) -> None:
    run = begin(tmp_path, done(), require_efa=True)
    run.until("running")
    run.workers.fail()
    assert run.decide()
    run.workers.places[1] = Place(node_id="other")
    run.workers.part = done(SOCKETS)
    with pytest.raises(
        EfaError, match=r"its files are kept; see docs/efa\.md; the same command with --run-name mine resumes the run"
    ):
        run.driver._direct(run.workers)


def test_required_efa_on_one_node_is_a_line(tmp_path: Path) -> None:
    run = NetworkRun(tmp_path, None, require_efa=True)
    run.workers.places = [Place(node_id="node-0")] * 2
    run.step()
    assert not run.told.measures
    assert "--require-efa: all workers are on one node, and use no network" in run.lines


def test_required_efa_that_is_used_starts_the_scripts(tmp_path: Path) -> None:
    begin(tmp_path, done(), require_efa=True).until("running")


def test_node_lost_while_it_measures_is_replaced(tmp_path: Path) -> None:
    run = begin(tmp_path)
    lose(run, 1)
    run.until("ended")
    assert run.driver._ended_for == "lost"
    run.driver._decide(run.workers)
    run.workers.part = done()
    run.until("running")  # on the same nodes, which had not measured
    assert run.workers.measured == {0, 1}


def test_notice_while_it_measures_moves_the_run(tmp_path: Path, clock: Clock) -> None:
    run = begin(tmp_path)
    give_notice(run)
    clock.now += 2
    run.until("ended")
    assert run.driver._ended_for == "reclaimed"


def test_stop_while_it_measures_ends_the_run(tmp_path: Path) -> None:
    run = begin(tmp_path)
    run.workers.events[len(run.workers.told) + 1] = stop
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        run.driver._direct(run.workers)
    assert run.state == "ended"


def test_receipt_that_the_storage_refuses_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin(tmp_path)
    refused: list[object] = []

    def fail(*arguments: object) -> None:
        refused.append(arguments[-1])
        raise OSError("no")

    monkeypatch.setattr(type(run.storage), "write_json", fail)
    run.workers.part = done()
    run.until("running")
    for writer in (thread for thread in threading.enumerate() if thread.name == "network"):
        writer.join()
    assert any(isinstance(each, dict) and "network" in each for each in refused)
