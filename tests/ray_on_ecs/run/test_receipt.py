"""Receipt of the network: its line, its warning, and when the workers measure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import UsageError
from ray_on_ecs.run import receipt as module
from ray_on_ecs.run.group import NetworkStatus, Place, WorkerStatus
from ray_on_ecs.run.nccl_log import Transport
from ray_on_ecs.run.network import BYTES
from ray_on_ecs.run.receipt import TOO_LONG, InstanceNetwork, NetworkCheck, Receipt
from tests.run_folders import Clock

EFA = Transport("NCCL", "EFA", 4)
SOCKETS = Transport("NCCL", "sockets", 1, ("eth0",), "its plugin found no EFA device")
P4D = InstanceNetwork(("p4d.24xlarge",), 4, 400.0)
PLACES = [Place(node_id=node) for node in ("a", "a", "b", "b")]
DONE = NetworkStatus(EFA, 0.01, has_ended=True)


def receipt(transport: Transport | None = EFA, seconds: float = 0.01, **changes: Any) -> Receipt:
    return replace(Receipt(2, 16, transport, seconds, "", P4D), **changes)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def check(**settings: Any) -> NetworkCheck:
    return NetworkCheck(RunConfig(command=("train.py",), **settings))


def result_of(check: NetworkCheck, *parts: NetworkStatus | None) -> Receipt | None:
    workers = {rank: WorkerStatus(network=part) for rank, part in enumerate(parts)}
    return check.result(workers, len(parts), lambda: P4D)


def test_line_has_network_and_bandwidth() -> None:
    assert receipt().line == (
        "network: NCCL uses EFA (4 interfaces); all-reduce of 256 MiB on 2 nodes: 403 Gbit/s per node, baseline of "
        "p4d.24xlarge: 400 Gbit/s"
    )
    assert receipt(SOCKETS, 1.0, instances=InstanceNetwork()).line == (
        "network: NCCL uses sockets (eth0); all-reduce of 256 MiB on 2 nodes: 4.03 Gbit/s per node"
    )


@pytest.mark.parametrize(
    ("transport", "known"), [(EFA, "NCCL uses EFA (4 interfaces)"), (None, "the network that is used is not known")]
)
def test_line_without_bandwidth_has_the_reason(transport: Transport | None, known: str) -> None:
    line = receipt(transport, 0.0, failure="rank 3: RuntimeError: x").line
    assert line == (
        f"network: {known}; its bandwidth was not measured: rank 3: RuntimeError: x; --network-check off starts the "
        "script without the measurement"
    )


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({}, ""),
        ({"transport": Transport("NCCL", "EFA", 32)}, ""),
        ({"transport": Transport("NCCL", "EFA")}, ""),  # a plugin that does not count
        ({"transport": Transport("NCCL", "EFA", 1)}, "network: NCCL has found 1 of the 4 EFA interfaces of a node"),
        (
            {"transport": SOCKETS},
            "network: the instances have EFA (4 interfaces), and NCCL uses sockets (eth0) instead (its plugin found no "
            "EFA device)",
        ),
        (
            {"transport": Transport("NCCL", "libfabric's provider tcp", 1), "seconds": 0.0},
            "network: the instances have EFA (4 interfaces), and NCCL uses libfabric's provider tcp (1 interface) "
            "instead",
        ),
        ({"transport": SOCKETS, "instances": InstanceNetwork(("g5.xlarge",), 0, 2.5)}, ""),
        ({"transport": None}, ""),
        ({"transport": Transport("Gloo", "sockets", 1, ("eth0",))}, ""),
    ],
)
def test_warning_of_efa_that_is_not_used(changes: dict[str, Any], warning: str) -> None:
    assert receipt(**changes).warning == warning


def test_document_has_all_that_is_known() -> None:
    document = receipt(SOCKETS, 1.0).document()
    assert document["transport"] == "sockets"
    assert document["interfaces"] == ["eth0"]
    assert document["busbw_gbits"] == pytest.approx(2 * 15 / 16 * BYTES * 8 / 1e9, abs=1e-3)
    assert document["warning"] == receipt(SOCKETS).warning
    unknown = receipt(None, 0.0, ranks=0, failure="x", instances=InstanceNetwork()).document()
    given = {"interfaces", "nodes", "bytes", "instance_types", "efa_interfaces", "failure"}
    assert {key for key, value in unknown.items() if value is not None} == given


@pytest.mark.parametrize(
    ("settings", "places", "measures"),
    [
        ({}, PLACES, True),
        ({}, PLACES[:2], False),
        ({}, PLACES[:1], False),
        ({"network_check": "off"}, PLACES, False),
        ({"mpi": True}, PLACES, False),
        ({"per_node": True}, PLACES, False),
        ({"driver": True}, PLACES, False),
    ],
)
def test_ranks_on_several_nodes_measure(settings: dict[str, Any], places: list[Place], measures: bool) -> None:
    assert check(**settings).begin(places) is measures


def measures(network: NetworkCheck, nodes: str, *parts: NetworkStatus | None) -> bool:
    """Begin a start on these nodes, with the result of its measurement; return whether it measures."""
    has_begun = network.begin([Place(node_id=node) for node in nodes])
    if has_begun and parts:
        assert result_of(network, *parts)
    return has_begun


@pytest.mark.parametrize(
    ("settings", "starts", "measured"),
    [
        ({}, ("ab", "ab", "ba", "abc", "cd"), ("ab",)),
        ({"require_efa": True}, ("ab", "ba", "ac", "ab", "bc", "cd", "a", "abcd"), ("ab", "ac", "cd")),
    ],
)
def test_nodes_that_have_measured_do_not_again(
    settings: dict[str, Any], starts: tuple[str, ...], measured: tuple[str, ...]
) -> None:
    network = check(**settings)
    assert [nodes for nodes in starts if measures(network, nodes, DONE, DONE)] == [*measured]


@pytest.mark.parametrize("settings", [{}, {"require_efa": True}])
def test_start_that_ends_before_the_receipt_measures_again(settings: dict[str, Any]) -> None:
    network = check(**settings)
    assert measures(network, "ab")
    assert result_of(network, DONE, None) is None
    assert measures(network, "ab", DONE, DONE)
    assert not measures(network, "ab")


@pytest.mark.parametrize("settings", [{}, {"require_efa": True}])
def test_measurement_that_hung_is_the_last(clock: Clock, settings: dict[str, Any]) -> None:
    network = check(**settings)
    assert measures(network, "ab")
    clock.now += module.LIMIT_SECONDS
    assert result_of(network, DONE, None)
    assert not measures(network, "cd")


def test_missing_torch_is_told_from_other_failures() -> None:
    missing = "rank 0: ModuleNotFoundError: No module named 'torch'"
    assert not receipt(None, 0.0, failure=missing).has_torch
    assert receipt(None, 0.0, failure="rank 0: ModuleNotFoundError: No module named 'torch.distributed'").has_torch
    assert receipt().has_torch


def test_receipt_waits_for_all_workers() -> None:
    network = check()
    network.begin(PLACES)
    assert result_of(network, DONE, None) is None
    assert result_of(network, DONE, NetworkStatus(EFA)) is None
    assert result_of(network, DONE, replace(DONE, seconds=0.02)) == receipt(seconds=0.02, ranks=2)
    assert result_of(network, DONE, NetworkStatus(has_ended=True)) == receipt(ranks=1)  # the second has no part


def test_one_failure_ends_the_measurement() -> None:
    network = check()
    network.begin(PLACES)
    failed = NetworkStatus(EFA, failure="RuntimeError: x", has_ended=True)
    result = result_of(network, NetworkStatus(EFA), failed)
    assert result == receipt(seconds=0.0, ranks=0, failure="rank 1: RuntimeError: x")


def test_bandwidth_is_known_without_the_network() -> None:
    network = check()
    network.begin(PLACES)
    result = result_of(network, *[replace(DONE, transport=None)] * 2)
    assert result == receipt(None, ranks=2)
    assert result is not None
    assert result.line.startswith(
        "network: the network that is used is not known; all-reduce of 256 MiB on 2 nodes: 215"
    )


@pytest.mark.parametrize("silent", [None, NetworkStatus(), NetworkStatus(SOCKETS)])
def test_measurement_ends_in_time(clock: Clock, silent: NetworkStatus | None) -> None:
    network = check()
    network.begin(PLACES)
    clock.now += module.LIMIT_SECONDS - 1
    assert result_of(network, DONE, silent) is None
    clock.now += 1
    result = result_of(network, DONE, silent)
    assert result is not None
    assert (result.gbits, result.failure) == (None, TOO_LONG)
    assert result.is_without_efa is bool(silent and silent.transport)


def test_rank_with_the_fewest_interfaces_counts() -> None:
    network = check()
    network.begin(PLACES)
    least = replace(DONE, transport=Transport("NCCL", "EFA", 1))
    result = result_of(network, DONE, least, DONE)
    assert result is not None
    assert result.transport == least.transport
    result = result_of(network, least, replace(DONE, transport=SOCKETS), DONE)
    assert result is not None
    assert result.transport == SOCKETS


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mpi": True}, "--mpi"),
        ({"per_node": True}, "--per-node"),
        ({"network_check": "off"}, "--network-check off"),
        ({"device": "cpu"}, "--device cpu"),
        ({"no_python": True}, "--no-python"),
        ({"driver": True}, "a Ray program starts its workers itself"),
    ],
)
def test_efa_is_not_required_where_nccl_is_not_tried(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=f"--require-efa: .*{named}"):
        check(require_efa=True, **settings)
