"""ClusterInfo parameter, with and without prices."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pulumi
import pytest

from infra.cluster_info import ClusterInfo, ClusterInfoArgs
from infra.types import NetworkRef, NodeSpec, Scale
from ray_on_ecs import cluster_info
from ray_on_ecs.cluster_info import NodeGroup, parse_cluster_info
from tests.infra.fake_aws import Cloud, later, node_spec

HEAD = node_spec("m5.xlarge", 1, usd=0.192)
OF_WORKERS = {"units": 1, "group": "workers-group", "provider": "workers-provider"}
OF_CPU_WORKERS = {
    "units": 4,
    "types": ["c6i.2xlarge"],
    "group": "cpu-workers-group",
    "provider": "cpu-workers-provider",
}
KINDS = ("workers", "workers-a", "cpu-workers", "h100-workers", "h100-workers-a", "prep-workers")
FIXED = Scale(initial_count=2, min_count=2, max_count=2, default_job_count=2, idle_minutes=0)


def document(cloud: Cloud, worker: NodeSpec, head: NodeSpec = HEAD, **more: Any) -> str:
    """The text of the parameter."""
    nowhere = later("")
    network = NetworkRef(
        zone="us-west-2b",
        subnets={"us-west-2a": "subnet-a", "us-west-2b": "subnet-b"},
        tasks_group_id=nowhere,
        instances_group_id=nowhere,
        network=pulumi.Resource.__new__(pulumi.Resource),
    )
    given: dict[str, Any] = {
        "nodes": {"head": head, "workers": worker},
        "scales": {"workers": FIXED},
        "default_gpus": 2,
        "cluster": "ray",
        "group_names": {kind: f"{kind}-group" for kind in KINDS},
        "provider_names": {kind: f"{kind}-provider" for kind in KINDS},
        "network": network,
        "placement_groups": {"us-west-2a": "pg-a", "us-west-2b": "pg-b"},
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


# The document of every stack with these workers before there were other pools, byte by byte.
OF_ONE_ZONE = (
    '{"cluster": "ray", "group": "workers-group", "types": ["g5.xlarge"], "gpus": 1, "default_gpus": 2, "zones": '
    '[{"zone": "us-west-2b", "subnet_id": "subnet-b", "placement_group": "pg-b"}], "spot": true, "spread": false, '
    '"prices": null, "disk_usd": 0.016, "head_usd": 0.192, "scaling": {"workers": {"min": 2, "max": 2, "idle_minutes": '
    '0, "units": 1, "group": "workers-group", "provider": "workers-provider"}}}'
)
OF_TWO_ZONES = OF_ONE_ZONE.replace(
    '"pg-b"}]', '"pg-b"}, {"zone": "us-west-2a", "subnet_id": "subnet-a", "placement_group": "pg-a"}]'
).replace('"spread": false', '"spread": true')
SPOT: dict[str, Any] = {"gpus": 1, "spot_count": 2, "disk_usd": 0.016, "pool": "default"}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, OF_ONE_ZONE),
        ({"zones": ()}, OF_ONE_ZONE),
        ({"zones": ("us-west-2b", "us-west-2a"), "spread": True}, OF_TWO_ZONES),
    ],
    ids=["a zone", "the zone of the state", "spread"],
)
def test_document_without_other_pools_stays_as_it_was(cloud: Cloud, more: dict[str, Any], text: str) -> None:
    assert document(cloud, node_spec("g5.xlarge", **SPOT, **more)) == text


def test_gpu_is_told_where_the_family_does_not_tell_it(cloud: Cloud) -> None:
    unknown = node_spec("g99.xlarge", **SPOT)
    [instance] = unknown.instances
    named = replace(unknown, instances=(replace(instance, gpu_name="X100"),))
    made = document(cloud, named)
    assert json.loads(made)["gpu"] == "X100"
    info = parse_cluster_info(made)
    assert info is not None
    assert info["groups"]["workers"]["gpu"] == "X100"


def test_a_single_worker_has_no_placement_group_anywhere(cloud: Cloud) -> None:
    [zone] = facts(cloud, node_spec("g5.xlarge", 1, gpus=1))["zones"]
    assert zone["placement_group"] is None


def test_a_run_on_cpu_workers_finds_their_price(cloud: Cloud) -> None:
    worker, cpu_worker = node_spec("g5.xlarge", gpus=1, usd=1.0), node_spec("c6i.2xlarge", 1, usd=0.34)
    come_and_go = Scale(initial_count=2, min_count=0, max_count=4, default_job_count=2, idle_minutes=60)
    document = facts(
        cloud,
        worker,
        nodes={"head": HEAD, "workers": worker, "cpu-workers": cpu_worker},
        scales={"workers": come_and_go, "cpu-workers": FIXED},
    )
    assert document["prices"].keys() == {"g5.xlarge", "c6i.2xlarge"}
    assert document["types"] == ["g5.xlarge"]
    assert document["scaling"] == {
        "workers": {"min": 0, "max": 4, "idle_minutes": 60, **OF_WORKERS},
        "cpu-workers": {"min": 2, "max": 2, "idle_minutes": 0, **OF_CPU_WORKERS},
    }


def test_the_zone_may_be_an_output(cloud: Cloud) -> None:
    """The zone that the state keeps, with its subnet and placement group."""
    [zone] = facts(cloud, node_spec("g5.xlarge", gpus=1, zones=()))["zones"]
    assert zone == {"zone": "us-west-2b", "subnet_id": "subnet-b", "placement_group": "pg-b"}


def test_unknown_head_price_is_none(cloud: Cloud) -> None:
    assert facts(cloud, node_spec("g5.xlarge", gpus=1), head=node_spec("m5.xlarge", 1))["head_usd"] is None


def test_further_kinds_are_readable(cloud: Cloud) -> None:
    h100 = node_spec("p5.48xlarge", 3, gpus=8, usd=55.04, pool="h100", disk_usd=0.1)
    worker = node_spec("g5.xlarge", usd=1.0, **SPOT)
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
    few = replace(FIXED, min_count=0, initial_count=0, idle_minutes=30)
    text = document(cloud, worker, nodes=nodes, scales={kind: few if kind in there else FIXED for kind in KINDS})
    info = parse_cluster_info(text)
    assert info is not None
    assert set(info["groups"]) == set(KINDS)
    assert info["prices"] == {"g5.xlarge": 1.0, "c6i.2xlarge": 0.34, "p5.48xlarge": 55.04, "c6i.8xlarge": 1.36}
    pools = json.loads(text)["pools"]
    assert all(group.keys() == NodeGroup.__required_keys__ for group in pools.values())
    assert pools["h100-workers"] == {
        "pool": "h100",
        "zones": ["us-west-2b"],  # an Output
        "types": ["p5.48xlarge"],
        "gpu": "H100",
        "units": 8,
        "spot": False,
        "min": 2,
        "max": 2,
        "default_nodes": 2,
        "idle_minutes": 0,
        "group": "h100-workers-group",
        "provider": "h100-workers-provider",
        "disk_usd": 0.1,
    }
    assert (pools["workers-a"]["pool"], pools["workers-a"]["zones"]) == ("default", ["us-west-2a"])
    assert (pools["prep-workers"]["gpu"], pools["prep-workers"]["units"]) == ("", 32)
    assert [zone["zone"] for zone in json.loads(text)["zones"]] == ["us-west-2b"]


def test_cluster_info_of_the_stack_is_readable(cloud: Cloud) -> None:
    text = document(cloud, node_spec("g5.xlarge", gpus=1))
    info = parse_cluster_info(text)
    assert info is not None
    assert info.keys() == cluster_info.ClusterInfo.__required_keys__
    assert info["groups"]["workers"].keys() == NodeGroup.__required_keys__
    made = json.loads(text)
    for key in made.keys() - {"default_gpus", "disk_usd", "cluster", "group", "gpus"}:
        lacking = json.dumps({name: value for name, value in made.items() if name != key})
        assert parse_cluster_info(lacking) is None, key
