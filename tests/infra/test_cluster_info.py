"""ClusterInfo parameter, with and without prices."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from infra.cluster_info import ClusterInfo, ClusterInfoArgs
from infra.types import NodeSpec, Reservation, Scale
from ray_on_ecs import cluster_info
from ray_on_ecs.cluster_info import NodeGroup, parse_cluster_info
from tests.infra.fake_aws import Cloud, later, node_spec

HEAD = node_spec("m5.xlarge", 1, usd=0.192)
KINDS = ("workers", "workers-a", "cpu-workers", "h100-workers", "h100-workers-a", "prep-workers")
FIXED = Scale(initial_count=2, min_count=2, max_count=2, default_job_count=2, idle_minutes=0)


def document(cloud: Cloud, worker: NodeSpec, head: NodeSpec = HEAD, **more: Any) -> str:
    """The text of the parameter."""
    given: dict[str, Any] = {
        "nodes": {"head": head, "workers": worker},
        "scales": {"workers": FIXED},
        "cluster": "ray",
        "zone": later("us-west-2b"),
        "group_names": {kind: f"{kind}-group" for kind in KINDS},
        "provider_names": {kind: f"{kind}-provider" for kind in KINDS},
    }
    component = cloud.run(lambda: ClusterInfo("cluster-info", ClusterInfoArgs(**{**given, **more})))
    parameter = cloud.resources["cluster-info-parameter"].inputs
    assert parameter["type"] == "String"
    assert cloud.value(component.parameter.name) == "cluster-info-parameter"
    return parameter["insecureValue"]


def facts(cloud: Cloud, worker: NodeSpec, head: NodeSpec = HEAD, **more: Any) -> Any:
    """The document in the parameter."""
    return json.loads(document(cloud, worker, head, **more))


@pytest.mark.parametrize(
    ("usd", "of_cpu_workers", "prices"),
    [
        (1.0, 0.3, {"g5.xlarge": 1.0, "c6i.2xlarge": 0.3}),
        (None, 0.3, {"c6i.2xlarge": 0.3}),
        (1.0, None, {"g5.xlarge": 1.0}),
        (None, None, None),
    ],
)
def test_cluster_info_has_the_prices_that_are_known(
    cloud: Cloud, usd: float | None, of_cpu_workers: float | None, prices: dict[str, float] | None
) -> None:
    worker, cpu_worker = node_spec("g5.xlarge", gpus=1, usd=usd), node_spec("c6i.2xlarge", 1, usd=of_cpu_workers)
    nodes = {"head": HEAD, "workers": worker, "cpu-workers": cpu_worker}
    scales = {"workers": FIXED, "cpu-workers": FIXED}
    assert facts(cloud, worker, nodes=nodes, scales=scales)["prices"] == prices


def test_text_of_the_smallest_stack(cloud: Cloud) -> None:
    """Byte by byte: without spaces, as a parameter has at most 4096 characters, and in an order that stays."""
    worker = node_spec("g5.xlarge", gpus=1, usd=1.006, spot_count=2, disk_usd=0.016, pool="default")
    assert document(cloud, worker) == (
        '{"cluster":"ray","groups":{"workers":{"pool":"default","zones":["us-west-2b"],"types":["g5.xlarge"],'
        '"gpu":"A10G","units":1,"spot":true,"min":2,"max":2,"default_nodes":2,"idle_minutes":0,"disk_usd":0.016,'
        '"group":"workers-group","provider":"workers-provider"}},"prices":{"g5.xlarge":1.006},"head_usd":0.192,'
        '"network_gbits":{}}'
    )


@pytest.mark.parametrize(
    ("zones", "known"),
    [
        (("us-west-2a",), ["us-west-2a"]),
        ((), ["us-west-2b"]),
        (("us-west-2b", "us-west-2a"), ["us-west-2b", "us-west-2a"]),
    ],
    ids=["a zone", "the zone of the state", "spread"],
)
def test_zones_are_those_of_the_nodes(cloud: Cloud, zones: tuple[str, ...], known: list[str]) -> None:
    worker = node_spec("g5.xlarge", gpus=1, zones=zones)
    assert facts(cloud, worker)["groups"]["workers"]["zones"] == known


def test_gpu_has_the_name_of_ec2(cloud: Cloud) -> None:
    unknown = node_spec("g99.xlarge", gpus=1)
    [instance] = unknown.instances
    named = replace(unknown, instances=(replace(instance, gpu_name="X100"),))
    assert facts(cloud, named)["groups"]["workers"]["gpu"] == "X100"


def test_efa_and_reservation_are_told_where_they_are(cloud: Cloud) -> None:
    reservation = Reservation(id="cr-0123456789abcdef0", is_block=True, zone="us-west-2b", count=2)
    worker = node_spec("p5.48xlarge", gpus=8, efa_cards=(0, 1, 2), reservation=reservation)
    group = facts(cloud, worker)["groups"]["workers"]
    assert (group["efa"], group["reservation"]) == (3, {"id": reservation.id, "is_block": True})


def test_unknown_head_price_is_none(cloud: Cloud) -> None:
    assert facts(cloud, node_spec("g5.xlarge", gpus=1), head=node_spec("m5.xlarge", 1))["head_usd"] is None


def test_each_kind_is_readable(cloud: Cloud) -> None:
    h100 = node_spec("p5.48xlarge", 3, gpus=8, usd=55.04, pool="h100", disk_usd=0.1)
    worker = node_spec("g5.xlarge", usd=1.0, gpus=1, pool="default")
    there: dict[str, Any] = {"zones": ("us-west-2a",), "shares": True}
    nodes = {
        "head": HEAD,
        "workers": worker,
        "workers-a": replace(worker, **there),
        "cpu-workers": node_spec("c6i.2xlarge", 1, usd=0.34, pool="cpu"),
        "h100-workers": replace(h100, zones=()),
        "h100-workers-a": replace(h100, **there),
        "prep-workers": node_spec("c6i.8xlarge", 2, vcpus=32, usd=1.36, pool="prep"),
    }
    few = Scale(initial_count=0, min_count=0, max_count=4, default_job_count=3, idle_minutes=30)
    scales = {kind: few if kind == "h100-workers" else FIXED for kind in KINDS}
    info = parse_cluster_info(document(cloud, worker, nodes=nodes, scales=scales))
    assert info is not None
    assert info.keys() == cluster_info.ClusterInfo.__required_keys__
    assert [*info["groups"]] == [*KINDS]
    assert all(group.keys() == NodeGroup.__required_keys__ for group in info["groups"].values())
    assert info["prices"] == {"g5.xlarge": 1.0, "c6i.2xlarge": 0.34, "p5.48xlarge": 55.04, "c6i.8xlarge": 1.36}
    assert info["groups"]["h100-workers"] == {
        "pool": "h100",
        "zones": ["us-west-2b"],  # an Output
        "types": ["p5.48xlarge"],
        "gpu": "H100",
        "units": 8,
        "spot": False,
        "min": 0,
        "max": 4,
        "default_nodes": 3,
        "idle_minutes": 30,
        "group": "h100-workers-group",
        "provider": "h100-workers-provider",
        "disk_usd": 0.1,
    }
    told = {kind: (group["pool"], *group["zones"], group["gpu"]) for kind, group in info["groups"].items()}
    assert told == {
        "workers": ("default", "us-west-2b", "A10G"),
        "workers-a": ("default", "us-west-2a", "A10G"),
        "cpu-workers": ("cpu", "us-west-2b", ""),
        "h100-workers": ("h100", "us-west-2b", "H100"),
        "h100-workers-a": ("h100", "us-west-2a", "H100"),
        "prep-workers": ("prep", "us-west-2b", ""),
    }
    assert info["groups"]["prep-workers"]["units"] == 32
