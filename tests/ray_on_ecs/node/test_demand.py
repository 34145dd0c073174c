"""The GPUs and CPUs that the cluster needs by kind of worker; tests/commands/test_ray.py asks a real Ray."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ray.autoscaler.v2 import sdk

from ray_on_ecs.node import api, demand, resource_state
from ray_on_ecs.node.demand import Demand, Need, demand_of
from ray_on_ecs.node.resource_state import Node, ResourceState
from ray_on_ecs.pools import GPU_RESOURCE, ZONE_LABEL, Condition, Request
from tests.worker_pools import cpu_group, node_group, workers

GROUP = "ray.io/node-group"
WITHOUT_CPU_WORKERS = workers(workers=node_group(units=4))
WITH_CPU_WORKERS = workers(workers=node_group(units=4), cpu_workers=cpu_group())


def node(
    gpus: float = 0, cpus: float = 4, *, gpus_used: float = 0, cpus_used: float = 0, idle: float = 0, **labels: str
) -> Node:
    """A node; labels are `pool` and `zone`."""
    names = {"pool": GROUP, "zone": ZONE_LABEL}
    total = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
    used = {"CPU": cpus_used, "GPU": gpus_used}
    available = {name: amount - used[name] for name, amount in total.items() if amount > used[name]}
    found = {names[key]: value for key, value in labels.items()}
    return Node(labels=found, total=total, available=available, idle_seconds=idle)


def worker(**more: Any) -> Node:
    return node(4, **more)


def cpu_worker(used: float = 0, **more: Any) -> Node:
    return node(cpus=16, cpus_used=used, pool="cpu-workers", **more)


def asks(gpus: float = 0, cpus: float = 0, *conditions: Condition, count: int = 1) -> tuple[Request, int]:
    """A request for GPUs and CPUs on one node."""
    return Request({name: amount for name, amount in (("GPU", gpus), ("CPU", cpus)) if amount}, conditions), count


def of(*pools: str, is_not: bool = False) -> Condition:
    return Condition(GROUP, tuple(pools), is_not)


def state(*nodes: Node, pending: Any = (), requested: Any = ()) -> ResourceState:
    return ResourceState(nodes=nodes, pending=tuple(pending), requested=tuple(requested))


HALF = asks(0.5)
ROUNDED = [asks(each) for each in (0.1, 0.2, 0.7)]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (state(), 0),
        (state(pending=[asks(3)]), 3),
        (state(worker(), pending=[asks(1)]), 1),
        (state(worker()), 0),
        (state(worker(gpus_used=1)), 1),
        (state(worker(cpus_used=1)), 1),
        (state(worker(cpus_used=1), pending=[asks(2)]), 3),
        (state(worker(gpus_used=3), pending=[asks(1)]), 4),
        (state(worker(gpus_used=4), pending=[asks(2)]), 6),
        (state(pending=[asks(cpus=8)]), 1),
        (state(pending=[asks(cpus=2), asks(1, count=2)]), 2),
        (state(worker(gpus_used=4), pending=[asks(cpus=8)]), 4),
        (state(pending=[HALF]), 1),
        (state(worker(gpus_used=0.1 + 0.2 + 0.7), pending=ROUNDED), 2),
        (state(worker(), requested=[asks(1, count=2)]), 2),
        (state(requested=[asks(2)], pending=[asks(3)]), 3),
        (state(requested=[asks(cpus=2)]), 0),
        (state(node(cpus=0)), 0),
        (state(pending=[(Request({"memory": 1e9}), 1)]), 0),
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
        "a fraction of a GPU is a GPU",
        "but a rounding error is none",
        "requested GPUs are kept",
        "and more can be needed",
        "requested CPUs start no GPU",
        "the head counts for none",
        "nor does work for neither",
    ],
)
def test_desired_gpus(found: ResourceState, wanted: int) -> None:
    result = demand_of(found, WITHOUT_CPU_WORKERS)
    assert result.needs.keys() == {"workers"}
    assert result.needs["workers"].requested == wanted
    assert result.unmet == ()


@pytest.mark.parametrize(
    ("found", "gpus", "cpus"),
    [
        (state(), 0, 0),
        (state(pending=[asks(cpus=8)]), 0, 8),
        (state(pending=[asks(cpus=2, count=4)]), 0, 8),
        (state(pending=[asks(cpus=8)], requested=[asks(cpus=8)]), 0, 8),
        (state(cpu_worker()), 0, 0),
        (state(worker(), cpu_worker(1)), 0, 1),
        (state(cpu_worker(), pending=[asks(cpus=1)]), 0, 1),
        (state(cpu_worker(0.1 + 0.2 + 0.7)), 0, 1),
        (state(cpu_worker(10), pending=[asks(cpus=6)]), 0, 16),
        (state(cpu_worker(16), pending=[asks(cpus=4.5)]), 0, 21),
        (state(worker(gpus_used=4, cpus_used=4), cpu_worker(), pending=[asks(2, 2)]), 6, 0),
        (state(cpu_worker(), requested=[asks(cpus=8)]), 0, 8),
        (state(cpu_worker(16), requested=[asks(cpus=8, count=4)], pending=[asks(cpus=4)]), 0, 32),
        (state(pending=[asks(cpus=64)]), 0, 64),
    ],
    ids=[
        "an empty cluster needs none",
        "pending work is served",
        "of several tasks",
        "what is requested has what waits in it",
        "with nothing in use and nothing pending all are stopped",
        "while a CPU worker works idle workers are stopped",
        "with nothing in use the unused are stopped",
        "a rounding error adds none",
        "free CPUs are used first",
        "pending work is added to what is used",
        "what workers do needs no CPU worker",
        "requested CPUs are kept",
        "and more than that can be needed",
        "more than a node has",
    ],
)
def test_desired_cpus_of_cpu_workers(found: ResourceState, gpus: int, cpus: int) -> None:
    needs = demand_of(found, WITH_CPU_WORKERS).needs
    assert {kind: need.requested for kind, need in needs.items()} == {"workers": gpus, "cpu-workers": cpus}


@pytest.mark.parametrize(
    ("found", "need"),
    [
        (state(worker(idle=5)), Need(requested=0, available=4, used=0, in_use=0, idle_seconds=(5,))),
        (state(worker(gpus_used=1.5, cpus_used=4)), Need(requested=2, available=4, used=1.5, in_use=1)),
        (
            state(worker(cpus_used=4), worker(idle=9)),
            Need(requested=1, available=8, used=1, in_use=1, idle_seconds=(9,)),
        ),
        (
            state(worker(), cpu_worker(8), pending=[asks(2, count=4)]),
            Need(requested=8, available=4, used=0, in_use=0, idle_seconds=(0,)),
        ),
    ],
    ids=["an idle worker", "work on GPUs", "work on a worker's CPUs alone", "work that waits, or on a CPU worker"],
)
def test_use_of_the_workers(found: ResourceState, need: Need) -> None:
    assert demand_of(found, WITH_CPU_WORKERS).needs["workers"] == need


# Several pools

POOLS = workers(
    workers=node_group(max=4),
    workers_b=node_group(max=4, zone="us-west-2b"),
    cpu_workers=cpu_group(),
    h100_workers=node_group("h100", "p5.48xlarge", units=8, max=2, zone="us-west-2c"),
)
ZONE_B = Condition(ZONE_LABEL, ("us-west-2b",))
H100 = Request({"GPU": 1, f"{GPU_RESOURCE}H100": 0.001})


def requested(found: ResourceState) -> Mapping[str, int]:
    """The requested numbers that are not 0."""
    needs = demand_of(found, POOLS).needs
    return {kind: need.requested for kind, need in needs.items() if need.requested}


@pytest.mark.parametrize(
    ("pending", "wanted"),
    [
        ([asks(1, count=3)], {"workers": 3}),
        ([asks(1, 1, ZONE_B, count=2)], {"workers-b": 2}),
        ([asks(1, 1, of("h100"))], {"h100-workers": 1}),
        ([asks(8)], {"h100-workers": 8}),
        ([asks(1, 1, of("h100", "cpu-workers", is_not=True))], {"workers": 1}),
        ([(H100, 4)], {"h100-workers": 4}),
        ([asks(1, 0, of("h100"), count=2), asks(1, 0, of("h100", is_not=True)), asks(cpus=3)],
         {"h100-workers": 2, "workers": 1, "cpu-workers": 3}),
        ([asks(0, 8, of("h100"))], {"h100-workers": 1}),
        ([asks(0, 8, of("h100")), asks(2, 0, of("h100"))], {"h100-workers": 2}),
        ([asks(0, 8, of("cpu-workers", is_not=True))], {"workers": 1}),
    ],
    ids=["no condition", "a zone", "a pool", "more GPUs than a node of the first", "not the others", "a GPU", "a gang",
         "CPUs of a pool with GPUs", "which GPUs bring along", "CPUs beside the CPU workers"],
)  # fmt: skip
def test_pending_requests_by_kind(pending: Any, wanted: Mapping[str, int]) -> None:
    assert requested(state(pending=pending)) == wanted


def test_nodes_count_for_their_kind() -> None:
    nodes = [
        node(1, gpus_used=1, zone="us-west-2a"),
        node(1, zone="us-west-2b", idle=7),
        node(8, 96, gpus_used=3, pool="h100", zone="us-west-2c"),
        node(cpus=8, cpus_used=2, pool="cpu-workers", zone="us-west-2a"),
        node(1, gpus_used=1, pool="removed", zone="us-west-2a"),
        node(1, gpus_used=1, zone="us-west-2d"),
        node(8, gpus_used=8, pool="h100", zone="us-west-2a"),
        node(cpus=0),
    ]
    assert demand_of(state(*nodes), POOLS) == Demand(
        needs={
            "workers": Need(requested=1, available=1, used=1, in_use=1),
            "workers-b": Need(requested=0, available=1, used=0, in_use=0, idle_seconds=(7,)),
            "cpu-workers": Need(requested=2, available=8, used=2, in_use=1),
            "h100-workers": Need(requested=3, available=8, used=3, in_use=1),
        }
    )


def test_a_program_requests_what_is_there_first() -> None:
    """request_resources has no selectors, and includes what the program uses already."""
    there = node(8, gpus_used=4, pool="h100")
    assert requested(state(there, requested=[asks(1, count=4)])) == {"h100-workers": 4}
    assert requested(state(there, requested=[asks(1, count=10)])) == {"h100-workers": 8, "workers": 2}
    assert requested(state(requested=[asks(1, count=2), asks(8)])) == {"workers": 2, "h100-workers": 8}


@pytest.mark.parametrize(
    "request_", [asks(9)[0], asks(1, 0, of("gone"))[0], Request({"GPU": 1, f"{GPU_RESOURCE}B200": 0.001}),
                 Request({"CPU": 1}, (of("gone"),), ((of("also-gone"),),))],
    ids=["too many GPUs", "another pool", "another GPU", "no fallback"],
)  # fmt: skip
def test_a_request_that_no_kind_fits_is_named_and_starts_nothing(request_: Request) -> None:
    found = demand_of(state(pending=[(request_, 2), asks(1)]), POOLS)
    assert found.unmet == (request_,)
    assert {kind for kind, need in found.needs.items() if need.requested} == {"workers"}


def used_node(address: str, **used: float) -> Node:
    """A worker with four GPUs of which so much is used."""
    total = dict.fromkeys(("CPU", "GPU", "memory"), 4.0)
    return Node(address=address, labels={}, total=total, available={name: 4 - used.get(name, 0.0) for name in total})


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
def cluster(monkeypatch: pytest.MonkeyPatch, stored: dict[bytes, bytes]) -> list[Node]:
    """The nodes that the GCS knows as alive."""
    nodes: list[Node] = []
    monkeypatch.setattr(api, "check_gcs", lambda gcs_address: None)
    monkeypatch.setattr(resource_state, "read_nodes", lambda gcs_address: tuple(nodes))
    return nodes


@pytest.mark.parametrize(
    ("used", "in_use"),
    [({}, False), ({"GPU": 0.5}, True), ({"CPU": 1.0}, True), ({"memory": 1.0}, False), ({"GPU": 1e-9}, False)],
    ids=["idle", "a part of a GPU", "a CPU", "memory alone", "a rounding error"],
)
def test_a_node_goes_by_its_own_use(cluster: list[Node], used: dict[str, float], in_use: bool) -> None:
    cluster += [used_node("10.0.0.1", **used), used_node("10.0.0.2", GPU=4.0), used_node("10.0.0.3")]
    assert demand.node_in_use("head:6379", "10.0.0.1") is in_use
    assert not demand.node_in_use("head:6379", "10.0.0.3")
    assert not demand.node_in_use("head:6379", "10.0.0.9"), "it has not joined yet"


@pytest.mark.parametrize(
    ("ago", "used", "in_use"),
    [(None, 0.0, False), (5, 0.0, None), (5, 1.0, True), (130, 0.0, False), (-5, 0.0, False)],
    ids=["not released", "released", "released and in use", "long ago", "by a clock that is ahead"],
)
def test_an_idle_node_may_be_released(
    cluster: list[Node], stored: dict[bytes, bytes], ago: float | None, used: float, in_use: bool | None
) -> None:
    cluster += [used_node("10.0.0.1", GPU=used)]
    if ago is not None:
        demand.release_idle("head:6379")
        stored[demand.RELEASED] = str(float(stored[demand.RELEASED]) - ago).encode()
    assert demand.node_in_use("head:6379", "10.0.0.1") is in_use


def test_silent_gcs_is_an_error() -> None:
    with pytest.raises(OSError, match="doesn't answer"):
        demand.node_in_use("127.0.0.1:9", "10.0.0.1")
