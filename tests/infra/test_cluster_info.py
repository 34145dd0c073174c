"""ClusterInfo parameter, with and without prices."""

from __future__ import annotations

import json
from typing import Any

import pulumi
import pytest

from infra.cluster_info import ClusterInfo, ClusterInfoArgs
from infra.types import NetworkRef, NodeSpec, Scale
from ray_on_ecs import cluster_info
from tests.infra.fake_aws import Cloud, node_spec

HEAD = node_spec("m5.xlarge", 1, usd=0.192)
OF_WORKERS = {"units": 1, "group": "workers-group", "provider": "workers-provider"}
OF_CPU_WORKERS = {"units": 4, "group": "cpu-workers-group", "provider": "cpu-workers-provider"}
FIXED = Scale(initial_count=2, min_count=2, max_count=2, default_job_count=2, idle_minutes=0)


def facts(cloud: Cloud, worker: NodeSpec, head: NodeSpec = HEAD, **more: Any) -> Any:
    """The document in the parameter."""
    nowhere = pulumi.Output.from_input("")
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
        "group_names": {"workers": "workers-group", "cpu-workers": "cpu-workers-group"},
        "provider_names": {"workers": "workers-provider", "cpu-workers": "cpu-workers-provider"},
        "network": network,
        "placement_groups": {"us-west-2a": "pg-a", "us-west-2b": "pg-b"},
    }
    made = cloud.run(lambda: ClusterInfo("cluster-info", ClusterInfoArgs(**{**given, **more})))
    parameter = cloud.resources["cluster-info-parameter"].inputs
    assert parameter["type"] == "String"
    assert cloud.value(made.parameter.name) == "cluster-info-parameter"
    return json.loads(parameter["insecureValue"])


@pytest.mark.parametrize("usd", [1.006, None])
def test_cluster_info_has_prices_or_none(cloud: Cloud, usd: float | None) -> None:
    prices = facts(cloud, node_spec("g5.xlarge", gpus=1, usd=usd))["prices"]
    assert prices == ({"g5.xlarge": 1.006} if usd else None)


def test_runs_find_where_the_workers_may_go(cloud: Cloud) -> None:
    document = facts(
        cloud, node_spec("g5.xlarge", gpus=1, zones=("us-west-2b", "us-west-2a"), spot_count=2, disk_usd=0.016)
    )
    assert document == {
        "cluster": "ray",
        "group": "workers-group",
        "types": ["g5.xlarge"],
        "gpus": 1,
        "default_gpus": 2,
        "zones": [
            {"zone": "us-west-2b", "subnet_id": "subnet-b", "placement_group": "pg-b"},
            {"zone": "us-west-2a", "subnet_id": "subnet-a", "placement_group": "pg-a"},
        ],
        "spot": True,
        "spread": False,
        "prices": None,
        "disk_usd": 0.016,
        "head_usd": 0.192,
        "scaling": {"workers": {"min": 2, "max": 2, "idle_minutes": 0, **OF_WORKERS}},
    }


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


def test_cluster_info_of_the_stack_is_readable(cloud: Cloud) -> None:
    document = facts(cloud, node_spec("g5.xlarge", gpus=1))
    assert cluster_info.parse_cluster_info(json.dumps(document)) == document
    assert document.keys() == cluster_info.ClusterInfo.__annotations__.keys()
    assert document["zones"][0].keys() == cluster_info.Zone.__annotations__.keys()
    assert document["scaling"]["workers"].keys() == cluster_info.Scaling.__annotations__.keys()
    for key in document.keys() - {"default_gpus", "disk_usd", "cluster"}:
        lacking = json.dumps({name: value for name, value in document.items() if name != key})
        assert cluster_info.parse_cluster_info(lacking) is None, key
