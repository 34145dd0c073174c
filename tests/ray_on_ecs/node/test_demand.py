"""The GPUs and the CPU workers' CPUs that the cluster needs, by rule; tests/commands/test_ray.py asks a real Ray."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.autoscaler.v2 import sdk
from ray.autoscaler.v2.schema import NodeInfo, NodeUsage, ResourceUsage

from ray_on_ecs.node import api, demand
from ray_on_ecs.node.demand import Demand


@pytest.mark.parametrize(
    ("demand", "wanted"),
    [
        (Demand(), 0),
        (Demand(gpus_waiting=3), 3),
        (Demand(gpus=4, gpus_waiting=1), 1),
        (Demand(gpus=4), 0),
        (Demand(gpus=4, gpus_used=1), 1),
        (Demand(gpus=4, worker_cpus_used=1), 1),
        (Demand(gpus=4, worker_cpus_used=1, gpus_waiting=2), 3),
        (Demand(gpus=4, gpus_used=3, gpus_waiting=1), 4),
        (Demand(gpus=4, gpus_used=4, gpus_waiting=2), 6),
        (Demand(cpus_waiting=8), 1),
        (Demand(cpus_waiting=2, gpus_waiting=2), 2),
        (Demand(gpus=1, gpus_used=1, cpus_waiting=8), 1),
        (Demand(cpus_waiting=8, cpus_requested=8, has_cpu_workers=True), 0),
        (Demand(gpus=4, cpu_worker_cpus=8, cpu_worker_cpus_used=1, has_cpu_workers=True), 0),
        (Demand(gpus_waiting=0.5), 1),
        (Demand(gpus=1, gpus_used=0.1 + 0.2 + 0.7, gpus_waiting=0.1 + 0.2 + 0.7), 2),
        (Demand(gpus=4, gpus_requested=2), 2),
        (Demand(gpus_requested=2, gpus_waiting=3), 3),
    ],
    ids=[
        "an empty cluster needs none",
        "pending work is served",
        "with nothing in use the unused are stopped",
        "with nothing in use and nothing pending all are stopped",
        "while a GPU is in use the others are stopped",
        "a worker whose CPUs alone are in use stays",
        "and counts as one GPU beside pending work",
        "free GPUs are used first",
        "pending work is added to what is used",
        "work for CPUs needs a worker",
        "which pending GPUs bring along",
        "or a worker that is there",
        "and none where CPU workers do it",
        "while a CPU worker works idle workers are stopped",
        "a fraction of a GPU is a GPU",
        "but a rounding error is none",
        "requested GPUs are kept",
        "and more can be needed",
    ],
)
def test_desired_gpus(demand: Demand, wanted: int) -> None:
    assert demand.gpus_needed == wanted


@pytest.mark.parametrize(
    ("demand", "used"),
    [
        (Demand(gpus=4), 0),
        (Demand(gpus=4, gpus_used=1.5, worker_cpus_used=8), 1.5),
        (Demand(gpus=4, worker_cpus_used=8), 1),
        (Demand(gpus=4, gpus_waiting=8, cpu_worker_cpus=8, cpu_worker_cpus_used=8), 0),
    ],
    ids=["an idle worker", "work on GPUs", "work on a worker's CPUs alone", "work that waits, or on a CPU worker"],
)
def test_the_number_of_gpus_that_are_in_use(demand: Demand, used: float) -> None:
    assert demand.gpus_in_use == used


@pytest.mark.parametrize(
    ("demand", "wanted"),
    [
        (Demand(), 0),
        (Demand(cpus_waiting=8), 8),
        (Demand(cpu_worker_cpus=16), 0),
        (Demand(cpu_worker_cpus=16, cpus_waiting=1), 1),
        (Demand(cpu_worker_cpus=16, cpu_worker_cpus_used=1), 1),
        (Demand(cpu_worker_cpus=16, cpu_worker_cpus_used=0.1 + 0.2 + 0.7), 1),
        (Demand(cpu_worker_cpus=16, cpu_worker_cpus_used=10, cpus_waiting=6), 16),
        (Demand(cpu_worker_cpus=16, cpu_worker_cpus_used=16, cpus_waiting=4.5), 21),
        (Demand(cpu_worker_cpus=16, gpus=4, gpus_used=4, worker_cpus_used=4, gpus_waiting=2), 0),
        (Demand(cpu_worker_cpus=16, cpus_requested=8), 8),
        (Demand(cpu_worker_cpus=16, cpu_worker_cpus_used=16, cpus_requested=32, cpus_waiting=4), 32),
    ],
    ids=[
        "an empty cluster needs none",
        "pending work is served",
        "with nothing in use and nothing pending all are stopped",
        "with nothing in use the unused are stopped",
        "while a CPU is in use the others are stopped",
        "and a rounding error adds none",
        "free CPUs are used first",
        "pending work is added to what is used",
        "what workers do needs no CPU worker",
        "requested CPUs are kept",
        "and what is requested has what waits in it",
    ],
)
def test_desired_cpus_of_cpu_workers(demand: Demand, wanted: int) -> None:
    assert demand.cpu_worker_cpus_needed == wanted


def node(ip_address: str, **used: float) -> NodeInfo:
    """A worker with four GPUs of which so much is used."""
    usage = [ResourceUsage(name, 4.0, used.get(name, 0.0)) for name in ("CPU", "GPU", "memory")]
    return NodeInfo("", "", "", ip_address, resource_usage=NodeUsage(usage, 0))


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """Ray's key-value store."""
    values: dict[bytes, bytes] = {}
    gcs = SimpleNamespace(
        internal_kv_get=lambda key, timeout: values.get(key),
        internal_kv_put=lambda key, value, overwrite, timeout: values.update({key: value}),
    )
    monkeypatch.setattr(sdk, "GcsClient", lambda gcs_address: gcs)
    return values


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, stored: dict[bytes, bytes]) -> list[NodeInfo]:
    """The nodes that the GCS knows as alive."""
    nodes: list[NodeInfo] = []

    def status(gcs_address: str, timeout: int) -> Any:
        return SimpleNamespace(active_nodes=nodes[:1], idle_nodes=nodes[1:])

    monkeypatch.setattr(api, "check_gcs", lambda gcs_address: None)
    monkeypatch.setattr(sdk, "get_cluster_status", status)
    return nodes


@pytest.mark.parametrize(
    ("used", "in_use"),
    [({}, False), ({"GPU": 0.5}, True), ({"CPU": 1.0}, True), ({"memory": 1.0}, False), ({"GPU": 1e-9}, False)],
    ids=["idle", "a part of a GPU", "a CPU", "memory alone", "a rounding error"],
)
def test_a_node_goes_by_its_own_use(cluster: list[NodeInfo], used: dict[str, float], in_use: bool) -> None:
    cluster += [node("10.0.0.1", **used), node("10.0.0.2", GPU=4.0), node("10.0.0.3")]
    assert demand.node_in_use("head:6379", "10.0.0.1") is in_use
    assert not demand.node_in_use("head:6379", "10.0.0.3")
    assert not demand.node_in_use("head:6379", "10.0.0.9"), "it has not joined yet"


@pytest.mark.parametrize(
    ("ago", "used", "in_use"),
    [(None, 0.0, False), (5, 0.0, None), (5, 1.0, True), (130, 0.0, False), (-5, 0.0, False)],
    ids=["not released", "released", "released and in use", "long ago", "by a clock that is ahead"],
)
def test_an_idle_node_may_be_released(
    cluster: list[NodeInfo], stored: dict[bytes, bytes], ago: float | None, used: float, in_use: bool | None
) -> None:
    cluster += [node("10.0.0.1", GPU=used)]
    if ago is not None:
        demand.release_idle("head:6379")
        stored[demand.RELEASED] = str(float(stored[demand.RELEASED]) - ago).encode()
    assert demand.node_in_use("head:6379", "10.0.0.1") is in_use


def test_silent_gcs_is_an_error() -> None:
    with pytest.raises(OSError, match="doesn't answer"):
        demand.node_in_use("127.0.0.1:9", "10.0.0.1")
