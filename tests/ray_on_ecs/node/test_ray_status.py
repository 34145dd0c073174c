"""State of Ray in the bucket: nodes by kind and pool, and what heads and commands of other versions read of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ray_on_ecs import pools
from ray_on_ecs.node import ray_status
from ray_on_ecs.node.ray_status import Node, nodes_of, workers_of
from ray_on_ecs.pools import ZONE_LABEL
from tests.worker_pools import cpu_group, node_group, workers

INFO = workers(
    workers=node_group(),
    workers_b=node_group(zone="us-west-2b"),
    cpu_workers=cpu_group(),
    h100_workers=node_group("h100", "p5.48xlarge", units=8),
    h100_workers_c=node_group("h100", "p5.48xlarge", units=8, zone="us-west-2c"),
)
GROUP = "ray.io/node-group"


def listed(labels: dict[str, str], *, is_head: bool = False) -> dict[str, Any]:
    """A node as Ray's dashboard lists it."""
    return {
        "state": "ALIVE",
        "node_id": "1",
        "is_head_node": is_head,
        "labels": labels,
        "resources_total": {"GPU": 1, "CPU": 4},
        "start_time_ms": 0,
    }


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The nodes that Ray's dashboard lists."""
    nodes: list[dict[str, Any]] = []

    def get(url: str) -> Any:
        if "nodes" in url:
            return {"data": {"result": {"result": nodes}}}
        return {"ray_version": "2.60.0"} if "version" in url else {"data": {"clusterStatus": {}}}

    monkeypatch.setattr(ray_status.api, "ask", get)
    return nodes


def stored(monkeypatch: pytest.MonkeyPatch, info: Any) -> dict[str, Any]:
    """The state as the head writes it, and a command reads it."""
    monkeypatch.setattr(ray_status, "read_cluster_info", lambda: info)
    return json.loads(json.dumps(ray_status.read()))


NODES = [
    # labels, with the stack's workers known, and not: kind and pool
    ({}, ("workers", "default"), ("workers", "default")),
    ({ZONE_LABEL: "us-west-2b"}, ("workers-b", "default"), ("workers", "default")),
    ({GROUP: "cpu-workers"}, ("cpu-workers", "cpu"), ("cpu-workers", "cpu")),
    ({GROUP: "h100", ZONE_LABEL: "us-west-2c"}, ("h100-workers-c", "h100"), ("h100-workers", "h100")),
    ({GROUP: "h100"}, ("h100-workers", "h100"), ("h100-workers", "h100")),
    ({ZONE_LABEL: "us-west-2d"}, ("workers-d", "default"), ("workers", "default")),
    ({GROUP: "cpu-workers", ZONE_LABEL: "us-west-2d"}, ("cpu-workers-d", "cpu"), ("cpu-workers", "cpu")),
    ({GROUP: "h100", ZONE_LABEL: "us-west-2d"}, ("h100-workers-d", "h100"), ("h100-workers", "h100")),
    ({GROUP: "removed"}, ("removed-workers", "removed"), ("removed-workers", "removed")),
]


@pytest.mark.parametrize("is_known", [True, False])
def test_kind_and_pool_of_each_node(
    dashboard: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    dashboard += [listed({}, is_head=True), *(listed(labels) for labels, *_ in NODES)]
    nodes = nodes_of(stored(monkeypatch, INFO if is_known else None))
    expected = [("head", ""), *(known if is_known else unknown for _, known, unknown in NODES)]
    assert [(node.kind, node.pool) for node in nodes] == expected


def test_a_command_chooses_pools_by_the_heads_state(monkeypatch: pytest.MonkeyPatch, dashboard: Any) -> None:
    info = workers_of(stored(monkeypatch, INFO))
    assert info is not None
    assert pools.candidates(info, gpus=["h100"]) == ["h100-workers", "h100-workers-c"]
    assert info["groups"] == INFO["groups"]
    assert pools.describe(info) == pools.describe(INFO)
    assert workers_of(stored(monkeypatch, None)) is None


OWN: dict[str, Any] = {
    **{"kind": "workers", "pool": "default", "instance_type": "g5.xlarge", "zone": None, "market": None},
    **{"gpus": 1, "cpus": 4, "gpus_used": 0, "cpus_used": 0, "up_seconds": 5},
}


@pytest.mark.parametrize("more", [{}, {"of_a_later_head": 1}])
def test_states_of_other_heads_are_read(more: dict[str, Any]) -> None:
    assert nodes_of({"nodes": [{**OWN, **more}]}) == [Node(**OWN)]


@pytest.mark.parametrize("node", [None, 1, [], {}, {"kind": "workers"}, {**OWN, "kind": []}, {**OWN, "pool": []}])
def test_broken_nodes_are_left_out(node: Any) -> None:
    assert nodes_of({"nodes": [node, OWN]}) == [Node(**OWN)]


@pytest.mark.parametrize("groups", [None, [], {}, "text", {"workers": None}, {"workers": {}}, {"workers": []}])
def test_broken_groups_are_not_used(groups: Any) -> None:
    assert workers_of({"groups": groups}) is None
    assert nodes_of({"groups": groups, "nodes": [OWN]}) == [Node(**OWN)]
