"""Cluster plan from settings and AWS's answers, and refused settings."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from infra.config import RayClusterArgs, idle_cost
from infra.config.location import INTERFACE_ENDPOINTS
from infra.config.plan import Plan, make_plan
from infra.definitions.sizing import TaskSize
from infra.errors import SettingError, error_reason
from infra.types import NodeSpec, Price
from tests.infra.fake_aws import ACCOUNT, CLUSTER, REGION, Cloud, FakeS3

ZONES = ["us-west-2a", "us-west-2a"]

# USD per hour of the disks' throughput: 441, 292 and 625 MiB/s of 40.96 USD per GiB/s and month.
HEAD_DISK, WORKER_DISK, CPU_DISK = 0.0242, 0.016, 0.0342


def plan(cloud: Cloud, **settings: Any) -> Plan:
    """The plan that follows from otherwise default settings."""
    return cloud.run(lambda: make_plan(RayClusterArgs(**settings), CLUSTER))


def test_default_plan_has_two_gpus_in_one_zone(cloud: Cloud) -> None:
    cluster = plan(cloud)
    assert cluster.location.region == REGION
    assert cluster.location.candidates == ("us-west-2a", "us-west-2b", "us-west-2c")
    assert (cluster.nodes["head"].instance_types, cluster.nodes["head"].max_count) == (("m5.large",), 1)
    assert cluster.nodes["head"].prices == {"m5.large": Price(on_demand=0.096 + HEAD_DISK)}
    assert cluster.nodes["head"].task == TaskSize(vcpus=2, memory_mib=6656, gpus=0)
    assert (cluster.nodes["workers"].instance_types, cluster.nodes["workers"].max_count) == (("g5.xlarge",), 2)
    assert cluster.nodes["workers"].prices == {"g5.xlarge": Price(on_demand=1.006 + WORKER_DISK)}
    assert cluster.nodes.keys() == cluster.scales.keys() | {"head"} == {"head", "workers"}
    assert cluster.nodes["workers"].task == TaskSize(vcpus=4, memory_mib=14336, gpus=1)
    assert cluster.gpus == 2
    assert cluster.hourly_usd == pytest.approx(0.096 + HEAD_DISK + 2 * (1.006 + WORKER_DISK))


@pytest.mark.parametrize(("settings", "workers"), [({}, 2), ({"max_workers": 5}, 5), ({"worker_count": 0}, 0)])
def test_estimate_counts_the_maximum_of_workers(cloud: Cloud, settings: dict[str, int], workers: int) -> None:
    assert plan(cloud, **settings).hourly_usd == pytest.approx(0.096 + HEAD_DISK + workers * (1.006 + WORKER_DISK))


def test_estimate_adds_head_and_workers_of_one_type(cloud: Cloud) -> None:
    assert plan(cloud, head_instance_type="g5.xlarge").hourly_usd == pytest.approx(3 * (1.006 + WORKER_DISK))


def test_cost_above_the_limit_is_refused(cloud: Cloud) -> None:
    with pytest.raises(SettingError) as refused:
        plan(cloud, max_hourly_usd=2.16)
    assert str(refused.value) == (
        "max_hourly_usd: 2.16 is below the 2.1642 USD per hour of 1 x m5.large and 2 x g5.xlarge; "
        "raise it, or use fewer (max_workers and worker_count) or smaller instances"
    )
    assert plan(cloud, max_hourly_usd=2.17).hourly_usd == pytest.approx(2.1642)


def test_a_type_without_a_price_leaves_the_others_theirs(cloud: Cloud, warnings: list[str]) -> None:
    cloud.prices = {"m5.large": 1.0, "g5.xlarge": 2.0}  # a p5.48xlarge may be sold in Capacity Blocks alone
    cluster = plan(cloud, **pools(h100={**H100, "max": 0}), max_hourly_usd=9.0)
    assert cluster.hourly_usd == pytest.approx(5.0, abs=0.1)
    assert not [line for line in warnings if "estimate" in line]
    cluster = plan(cloud, **pools(h100=H100))
    assert cluster.hourly_usd is None
    assert {kind: node.prices is not None for kind, node in cluster.nodes.items()} == {
        "head": True,
        "workers": True,
        "h100-workers": False,
    }
    assert [line for line in warnings if "0 prices of p5.48xlarge in us-west-2" in line]
    with pytest.raises(
        SettingError, match=r"^max_hourly_usd: 9\.0 can't be checked without the prices of p5\.48xlarge; "
    ):
        plan(cloud, **pools(h100=H100), max_hourly_usd=9.0)


def test_order_of_zones_changes_only_numbers(cloud: Cloud) -> None:
    def of(*zones: str) -> Mapping[str, NodeSpec]:
        return plan(cloud, **pools(h100={**H100, "min": 1, "zones": zones})).nodes

    first, second = of("us-west-2a", "us-west-2c"), of("us-west-2c", "us-west-2a")
    assert first.keys() == second.keys()
    assert {kind: node.zones for kind, node in first.items()} == {kind: node.zones for kind, node in second.items()}


def test_what_a_pool_without_maximum_lacks_refuses_nothing(cloud: Cloud) -> None:
    """Neither its purchase options, placement, machine images, role and prices, nor its zone."""
    cloud.absent = ("getRole",)
    cloud.amis = {AMI: {}}
    cloud.answers = {"getAmi": {"blockDeviceMappings": [{"deviceName": "/dev/xvda", "ebs": {"volume_size": "80"}}]}}
    cloud.not_offered = {"p5.48xlarge": tuple(cloud.zones)}
    idle = {"instance_types": ["p5.48xlarge"], "spot": True, "root_volume_gib": 60}
    assert plan(cloud, worker_ami_id=AMI, **pools(h100=idle))


@pytest.mark.parametrize(
    "name", ["trn1.2xlarge", "inf1.xlarge", "inf2.xlarge", "vt1.3xlarge", "f2.6xlarge", "dl2q.24xlarge"]
)
@pytest.mark.parametrize("where", ["pool", "cpu", "head", "workers"])
def test_other_accelerators_are_refused(cloud: Cloud, name: str, where: str) -> None:
    settings: dict[str, Any] = {
        "pool": pools(x={"instance_types": [name], "max": 1}),
        "cpu": {"cpu_worker_instance_types": (name,), "max_cpu_workers": 1},
        "head": {"head_instance_type": name},
        "workers": {"worker_instance_types": (name,)},
    }[where]
    with pytest.raises(SettingError, match=rf": '{name}' has .*, which the image does not support; use a type with"):
        plan(cloud, **settings)


def test_cost_limit_without_prices_is_refused(cloud: Cloud, warnings: list[str]) -> None:
    cloud.prices = None
    with pytest.raises(
        SettingError, match=r"^max_hourly_usd: 5\.0 can't be checked without the prices of m5.large and g5"
    ):
        plan(cloud, max_hourly_usd=5.0)
    [line] = warnings
    assert "pricing:GetProducts" in line


@pytest.mark.parametrize(("workers", "fits"), [(12, True), (13, False)])
def test_vpc_with_too_few_addresses_is_refused(cloud: Cloud, workers: int, fits: bool) -> None:
    settings = {"vpc_cidr": "10.0.0.0/24", "worker_count": workers, "check_quotas": False}
    if fits:
        plan(cloud, **settings)
        return
    with pytest.raises(SettingError) as refused:
        plan(cloud, **settings)
    assert str(refused.value) == (
        "vpc_cidr: '10.0.0.0/24' has 27 addresses per private subnet, too few for 14 nodes with two each; "
        "use a larger CIDR block, e.g. 10.0.0.0/16"
    )


def test_addresses_of_endpoints_are_counted(cloud: Cloud) -> None:
    number = len(INTERFACE_ENDPOINTS)
    settings = {"vpc_cidr": "10.0.0.0/24", "nat_gateway": False, "check_quotas": False}
    fit = (27 - number) // 2 - 1  # beside the head
    plan(cloud, **settings, worker_count=fit)
    with pytest.raises(SettingError) as refused:
        plan(cloud, **settings, worker_count=fit + 1)
    addresses = f"{27 - number} addresses per private subnet beside {number} VPC endpoints"
    assert f"has {addresses}, too few for {fit + 2} nodes with two each" in str(refused.value)


def test_vcpus_beyond_the_quota_are_refused(cloud: Cloud) -> None:
    with pytest.raises(SettingError) as refused:
        plan(cloud, worker_instance_types=("g5.12xlarge",), worker_count=4)
    assert str(refused.value) == (
        "worker_instance_types: 'g5.12xlarge' needs 192 vCPUs for 4 x g5.12xlarge, but the quota 'Running On-Demand G "
        "and VT instances' in us-west-2 is 64; request an increase in Service Quotas (L-DB2E81BA), use "
        "fewer (max_workers and worker_count) or smaller instances, or set "
        "check_quotas to false"
    )


def test_check_quotas_false_reads_no_quotas(cloud: Cloud) -> None:
    plan(cloud, worker_instance_types=("p4d.24xlarge",), check_quotas=False)
    assert not [token for token, _ in cloud.calls if token.endswith(":getServiceQuota")]


def test_unknown_instance_type_is_refused_with_cause(cloud: Cloud) -> None:
    cloud.answers = {"getInstanceTypeOfferings": {"instanceTypes": ["g99.huge", "m5.large"], "locations": ZONES}}
    with pytest.raises(SettingError) as refused:
        plan(cloud, worker_instance_types=("g99.huge",))
    message = str(refused.value)
    assert message.startswith("worker_instance_types: 'g99.huge' could not be found (")
    assert "g99.huge does not exist" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            "invoke failed: 1 error occurred:\n\t* reading type: api error InvalidInstanceType\n\n",
            "reading type: api error InvalidInstanceType",
        ),
        ("ExpiredToken: sign in again\nrequest id: 1", "ExpiredToken: sign in again"),
        ("", "ValueError"),
    ],
)
def test_the_cause_is_the_line_that_says_why(answer: str, line: str) -> None:
    assert error_reason(ValueError(answer)) == line


AMI = "ami-0123456789abcdef0"


NO_DOCKER = SettingError("image_build", "local", "needs Docker on this machine, but it is not installed", "start it")


@pytest.mark.parametrize(
    ("image_build", "problem", "builder", "refused"),
    [
        ("auto", None, "local", None),
        ("auto", NO_DOCKER, "codebuild", None),
        ("local", None, "local", None),
        ("local", NO_DOCKER, "local", NO_DOCKER),
        ("codebuild", None, "codebuild", None),
        ("codebuild", NO_DOCKER, "codebuild", None),
    ],
)
def test_docker_builds_if_it_answers_or_has_to(
    cloud: Cloud, image_build: str, problem: SettingError | None, builder: str, refused: SettingError | None
) -> None:
    cloud.image_problem = problem
    cluster = plan(cloud, image_build=image_build)
    assert (cluster.image_builder, cluster.image_problem) == (builder, refused)


@pytest.mark.parametrize("image_build", ["auto", "local", "codebuild"])
def test_a_ready_image_has_no_builder(cloud: Cloud, image_build: str) -> None:
    cloud.image_problem = NO_DOCKER
    cluster = plan(cloud, image_build=image_build, image_uri="public.example/ray@sha256:" + 64 * "a")
    assert (cluster.image_builder, cluster.image_problem) == ("", None)


def test_a_full_vpc_quota_is_a_problem_of_new_clusters(cloud: Cloud) -> None:
    cloud.quotas, cloud.vpcs = {"L-F678F1CE": 5.0}, 5
    assert "VPCs per Region" in str(plan(cloud).network_problem)
    cloud.vpcs = 4
    assert plan(cloud).network_problem is None


def test_a_stack_without_gpu_workers_is_warned_about(cloud: Cloud, warnings: list[str]) -> None:
    plan(cloud, worker_count=0, max_workers=1)
    assert not warnings
    plan(cloud, worker_count=0)
    assert warnings == ["max_workers: is 0, like worker_count, so that no run can have a GPU; set it, e.g. to 2"]


def test_cost_limit_uses_current_spot_prices(cloud: Cloud, warnings: list[str]) -> None:
    cluster = plan(cloud, spot=True)
    assert (cluster.nodes["workers"].spot_count, cluster.nodes["workers"].on_demand_count) == (2, 0)
    assert cluster.hourly_usd == pytest.approx(0.096 + HEAD_DISK + 2 * (1.006 + WORKER_DISK))
    assert plan(cloud, spot=True, max_hourly_usd=1.05)
    with pytest.raises(SettingError, match=r"^max_hourly_usd: 1\.0 is below the 1\.5582 USD per hour of"):
        plan(cloud, spot=True, on_demand_workers=1, max_hourly_usd=1.0)
    cloud.spot_prices = None
    with pytest.raises(SettingError, match=r"^max_hourly_usd: 1\.0 is below the 2\.1642 USD per hour of"):
        plan(cloud, spot=True, max_hourly_usd=1.0)
    assert "ec2:DescribeSpotPriceHistory" in warnings[0]


CPU_WORKERS: dict[str, Any] = {"cpu_worker_instance_types": ("c6i.2xlarge",)}


def test_cpu_workers_count_in_plan_cost_and_quota(cloud: Cloud) -> None:
    assert cloud.prices is not None
    cloud.prices["c6i.2xlarge"] = 0.34
    cluster = plan(cloud, **CPU_WORKERS, max_cpu_workers=3, cpu_worker_count=1)
    assert (
        cluster.nodes["cpu-workers"].max_count,
        cluster.nodes["cpu-workers"].task.vcpus,
        cluster.nodes["cpu-workers"].task.gpus,
    ) == (3, 8, 0)
    assert cluster.hourly_usd == pytest.approx(0.096 + HEAD_DISK + 2 * (1.006 + WORKER_DISK) + 3 * (0.34 + CPU_DISK))
    cloud.quotas = {"L-1216C47A": 4.0}
    with pytest.raises(
        SettingError, match=r"^cpu_worker_instance_types: 'c6i\.2xlarge' needs 26 vCPUs for 1 x m5\.large and 3 x"
    ):
        plan(cloud, **CPU_WORKERS, cpu_worker_count=3)


def test_nat_instance_requires_vcpus_and_no_address(cloud: Cloud) -> None:
    cloud.quotas, cloud.addresses = {"L-0263D0A3": 5.0, "L-1216C47A": 4.0}, 5
    cluster = plan(cloud, nat_instance=True)
    assert cluster.network_problem is None
    assert plan(cloud, nat_gateway=False).network_problem is None
    assert plan(cloud).network_problem
    cloud.quotas["L-1216C47A"] = 3.0
    with pytest.raises(
        SettingError, match=r"^head_instance_type: 'm5\.large' needs 4 vCPUs for 1 x m5\.large and 1 x t4g\.nano, but"
    ):
        plan(cloud, nat_instance=True)


def test_types_with_different_gpus_are_warned_about(cloud: Cloud, warnings: list[str]) -> None:
    cloud.prices = {"m5.large": 0.2, "g5.xlarge": 1.0, "g5.2xlarge": 1.2, "g4dn.xlarge": 0.5}
    plan(cloud, worker_instance_types=("g5.xlarge", "g5.2xlarge"))
    assert not warnings
    plan(cloud, worker_instance_types=("g5.xlarge", "g4dn.xlarge"))
    [line] = warnings
    assert line.startswith(
        "worker_instance_types: g5.xlarge has A10G with 22 GiB, g4dn.xlarge has T4 with 16 GiB; a run on"
    )


RESOLVE = "resolve:ssm:/aws/service/ecs/optimized-ami/amazon-linux-2023/"


def test_instances_start_with_the_newest_ami(cloud: Cloud, warnings: list[str]) -> None:
    cluster = plan(cloud, **CPU_WORKERS)
    assert [node.ami_id for node in cluster.nodes.values()] == [
        f"{RESOLVE}{variant}recommended/image_id" for variant in ("", "gpu/", "")
    ]
    cloud.amis = {AMI: {}}
    cluster = plan(cloud, head_ami_id=AMI, worker_ami_id=AMI)
    assert {node.ami_id for node in cluster.nodes.values()} == {AMI}
    assert not [line for line in warnings if "Amazon" in line]
    cloud.answers = {"getAmi": {"architecture": "arm64"}}
    with pytest.raises(SettingError, match=r"^head_ami_id: 'ami-\w+' is for arm64"):
        plan(cloud)


def test_workers_of_a_zone_share_a_placement_group(cloud: Cloud) -> None:
    cloud.answers = {"getInstanceType": {"supportedPlacementStrategies": ["spread"]}}
    assert plan(cloud, worker_count=1)
    assert plan(cloud, spread_zones=True, availability_zones=("us-west-2a", "us-west-2b"))
    with pytest.raises(SettingError, match=r"^worker_instance_types: 'g5\.xlarge' can't be in a cluster pl"):
        plan(cloud)


def test_spot_needs_a_type_that_is_sold_so(cloud: Cloud) -> None:
    cloud.answers = {"getInstanceType": {"supportedUsagesClasses": ["on-demand"]}}
    assert plan(cloud)
    with pytest.raises(SettingError, match=r"^worker_instance_types: 'g5\.xlarge' is sold as on-demand"):
        plan(cloud, spot=True)


def pools(**by_name: dict[str, Any]) -> dict[str, Any]:
    """Settings with these pools, without the check of quotas, which they exceed."""
    return {"worker_pools": by_name, "check_quotas": False}


H100 = {"instance_types": ["p5.48xlarge"], "max": 2}


def test_kinds_follow_the_pools(cloud: Cloud) -> None:
    two_zones = {"instance_types": ["g6.12xlarge"], "zones": ["us-west-2c", "us-west-2a"], "min": 1, "max": 3}
    cluster = plan(
        cloud,
        **pools(h100=H100, l4=two_zones, prep={"instance_types": ["c6i.8xlarge"], "initial": 1, "root_volume_gib": 50}),
        **CPU_WORKERS,
        max_cpu_workers=1,
        availability_zones=("us-west-2b", "us-west-2c"),
    )
    assert {kind: (node.pool, node.zones, node.shares, node.max_count) for kind, node in cluster.nodes.items()} == {
        "head": ("", ("us-west-2b",), False, 1),
        "workers": ("default", ("us-west-2b",), False, 2),
        "workers-c": ("default", ("us-west-2c",), True, 2),
        "cpu-workers": ("cpu", ("us-west-2b",), False, 1),
        "h100-workers": ("h100", ("us-west-2b",), False, 2),
        "l4-workers-c": ("l4", ("us-west-2c",), False, 3),
        "l4-workers-a": ("l4", ("us-west-2a",), True, 3),
        "prep-workers": ("prep", ("us-west-2b",), False, 1),
    }
    assert list(cluster.nodes) == ["head", *cluster.scales]
    assert [node.task.gpus for node in cluster.nodes.values()] == [0, 1, 1, 0, 8, 4, 4, 0]
    assert {node.ami_id for node in cluster.nodes.values() if node.task.gpus} == {f"{RESOLVE}gpu/recommended/image_id"}
    assert {node.ami_id for node in cluster.nodes.values() if not node.task.gpus} == {f"{RESOLVE}recommended/image_id"}
    assert {scale.idle_minutes for scale in cluster.scales.values()} == {30}
    assert cluster.scales["l4-workers-a"].default_job_count == cluster.scales["l4-workers-c"].default_job_count == 1
    assert cluster.gpus == 2


def test_spread_workers_are_one_node_group(cloud: Cloud) -> None:
    cluster = plan(cloud, availability_zones=("us-west-2b", "us-west-2a"), spread_zones=True, **pools(h100=H100))
    assert list(cluster.nodes) == ["head", "workers", "h100-workers"]
    assert (cluster.nodes["workers"].zones, cluster.nodes["workers"].spread) == (("us-west-2b", "us-west-2a"), True)
    assert (cluster.nodes["h100-workers"].zones, cluster.nodes["h100-workers"].spread) == (("us-west-2b",), False)


def test_pools_follow_the_zone_that_the_state_keeps(cloud: Cloud) -> None:
    cluster = plan(cloud, **pools(h100=H100, c={**H100, "zones": ["us-west-2c"]}))
    zones = {kind: node.zones for kind, node in cluster.nodes.items()}
    assert zones == {"head": (), "workers": (), "h100-workers": (), "c-workers-c": ("us-west-2c",)}


def test_every_subnet_has_a_node_group_of_the_default_pool(cloud: Cloud) -> None:
    cloud.subnet_zones = {"subnet-a": "us-west-2a"}
    network: dict[str, Any] = {"vpc_id": "vpc-0a1b", "subnet_ids": ("subnet-b", "subnet-a")}
    assert list(plan(cloud, **network).nodes) == ["head", "workers", "workers-a"]
    cluster = plan(cloud, **network, availability_zones=("us-west-2a",), **pools(b={**H100, "zones": ["us-west-2b"]}))
    assert {kind: node.zones for kind, node in cluster.nodes.items()} == {
        "head": ("us-west-2a",),
        "workers": ("us-west-2a",),
        "b-workers-b": ("us-west-2b",),
    }


def test_each_pool_counts_once_in_cost(cloud: Cloud) -> None:
    cloud.prices = {"m5.large": 1.0, "g5.xlarge": 2.0, "p5.48xlarge": 50.0}
    cloud.disk_price = 0.0001
    zones = ["us-west-2a", "us-west-2b", "us-west-2c"]
    settings = pools(h100={**H100, "zones": zones}) | {"availability_zones": zones}
    assert plan(cloud, **settings).hourly_usd == pytest.approx(1 + 2 * 2 + 2 * 50, abs=0.01)
    with pytest.raises(SettingError) as refused:
        plan(cloud, **settings, max_hourly_usd=100.0)
    assert re.fullmatch(
        r"max_hourly_usd: 100\.0 is below the 105\S* USD per hour of 1 x m5.large and 2 x g5.xlarge and 2 x "
        r"p5.48xlarge; raise it, or use fewer \(worker_pools.h100.max and worker_pools.h100.initial\) or smaller "
        r"instances",
        str(refused.value),
    )


def test_a_pool_without_maximum_costs_nothing(cloud: Cloud, warnings: list[str]) -> None:
    cloud.prices = {"m5.large": 1.0, "g5.xlarge": 2.0, "p5.48xlarge": 50.0}
    cloud.quotas = {"L-417A185B": 0.0}
    cluster = plan(cloud, worker_pools={"h100": {"instance_types": ["p5.48xlarge"]}})
    assert cluster.hourly_usd == plan(cloud).hourly_usd
    assert cluster.nodes["h100-workers"].max_count == cluster.scales["h100-workers"].max_count == 0
    assert warnings == [
        "worker_pools.h100.max: is 0, like initial and min, so that no run can use the pool; set it, e.g. to 2"
    ]


def test_gpus_of_another_pool_are_enough(cloud: Cloud, warnings: list[str]) -> None:
    cloud.prices = {"m5.large": 1.0, "g5.xlarge": 2.0, "p5.48xlarge": 50.0, "c6i.large": 0.1}
    plan(cloud, worker_count=0, **pools(h100=H100))
    assert not warnings
    plan(cloud, worker_count=0, **pools(prep={"instance_types": ["c6i.large"], "max": 2}))
    assert warnings == ["max_workers: is 0, like worker_count, so that no run can have a GPU; set it, e.g. to 2"]


def test_spot_prices_are_those_of_all_zones_of_a_pool(cloud: Cloud) -> None:
    asked: list[list[str]] = []
    answer = Cloud.describe_spot_price_history

    def describe(**question: Any) -> dict[str, Any]:
        asked.append(next(item["Values"] for item in question["Filters"]))
        return answer(cloud, **question)

    cloud.describe_spot_price_history = describe  # type: ignore[method-assign]
    cloud.prices = {"m5.large": 1.0, "g5.xlarge": 2.0, "p5.48xlarge": 50.0}
    cloud.spot_prices = {"p5.48xlarge": 10.0}
    h100 = {**H100, "spot": True, "on_demand": 1, "zones": ["us-west-2c", "us-west-2a"]}
    cluster = plan(cloud, **pools(h100=h100), max_hourly_usd=1000)
    assert asked == [["us-west-2a", "us-west-2c"]]
    assert cluster.nodes["h100-workers-c"].prices == cluster.nodes["h100-workers-a"].prices
    with pytest.raises(
        SettingError, match=r"is below the 65\S* USD per hour of .* and 2 x p5\.48xlarge \(1 on spot\); "
    ):
        plan(cloud, **pools(h100=h100), max_hourly_usd=60)


def test_quotas_sum_over_the_pools(cloud: Cloud) -> None:
    cloud.quotas = {"L-DB2E81BA": 64.0}
    l4 = {"instance_types": ["g6.12xlarge"], "zones": ["us-west-2c", "us-west-2a"], "max": 1}
    assert plan(cloud, worker_pools={"l4": l4})
    with pytest.raises(SettingError) as refused:
        plan(cloud, worker_pools={"l4": {**l4, "max": 2}})
    assert str(refused.value).startswith(
        "worker_pools.l4.instance_types: 'g6.12xlarge' needs 104 vCPUs for 2 x g5.xlarge and 2 x g6.12xlarge, but the "
    )
    assert "(L-DB2E81BA), use fewer (worker_pools.l4.max and worker_pools.l4.initial) or smaller" in str(refused.value)
    cloud.quotas["L-3819A6DF"] = 47.0
    with pytest.raises(
        SettingError, match=r"^worker_pools.l4.instance_types: .* needs 48 vCPUs for 1 x g6.12xlarge \(1"
    ):
        plan(cloud, worker_pools={"l4": {**l4, "spot": True}})


def test_rooms_of_zones_are_counted_apart(cloud: Cloud) -> None:
    few = {"vpc_cidr": "10.0.0.0/24", "worker_count": 7, "availability_zones": ("us-west-2b",)}  # 13 nodes in a zone
    other = {"instance_types": ["p5.48xlarge"], "max": 8}
    assert plan(cloud, **few, **pools(h100={**other, "zones": ["us-west-2c"]}))
    with pytest.raises(SettingError, match=r"^vpc_cidr: .* too few for 16 nodes with two each; "):
        plan(cloud, **few, **pools(h100=other))
    with pytest.raises(SettingError, match=r"^vpc_cidr: .* too few for 16 nodes with two each; "):
        plan(cloud, **{**few, "availability_zones": ()}, **pools(h100={**other, "zones": ["us-west-2c"]}))


@pytest.mark.parametrize(
    ("types", "line"),
    [
        (["p5.48xlarge", "p5e.48xlarge"], "'p5.48xlarge,p5e.48xlarge' are not equal: p5.48xlarge has H100 with 80"),
        (["p4d.24xlarge", "p4de.24xlarge"], "'p4d.24xlarge,p4de.24xlarge' are not equal: p4d.24xlarge has A100"),
        (["g5.xlarge", "g5.12xlarge"], "'g5.12xlarge' has 4 GPUs, but g5.xlarge has 1; "),
        (["g5.xlarge", "c6i.large"], "'c6i.large' does not have a whole GPU; "),
        (["c6i.large", "g5.xlarge"], "'c6i.large' does not have a whole GPU; "),
        (["g6f.large"], "'g6f.large' does not have a whole GPU; "),
        (["p3dn.24xlarge"], "'p3dn.24xlarge' has V100 GPUs, too old"),
        (["c7g.large"], "'c7g.large' is arm64, but the image is built for x86_64; "),
    ],
)  # fmt: skip
def test_types_of_a_pool_are_equal_and_usable(cloud: Cloud, types: list[str], line: str) -> None:
    with pytest.raises(SettingError) as refused:
        plan(cloud, **pools(x={"instance_types": types, "max": 1}))
    assert str(refused.value).startswith(f"worker_pools.x.instance_types: {line}")


def test_types_with_the_same_gpu_are_equal(cloud: Cloud, warnings: list[str]) -> None:
    cloud.prices = {"m5.large": 1.0, "g5.xlarge": 1.0, "g6.xlarge": 1.0, "g6.4xlarge": 2.0}
    cluster = plan(cloud, **pools(l4={"instance_types": ["g6.4xlarge", "g6.xlarge"], "max": 1}))
    assert cluster.nodes["l4-workers"].task == TaskSize(vcpus=4, memory_mib=14336, gpus=1)
    assert not warnings


def test_only_gpus_of_a_pool_share_a_placement_group(cloud: Cloud) -> None:
    cloud.answers = {"getInstanceType": {"supportedPlacementStrategies": ["spread"]}}
    assert plan(cloud, worker_count=1, **pools(x={"instance_types": ["g6.xlarge"], "max": 1}))
    assert plan(cloud, worker_count=1, **pools(x={"instance_types": ["c6i.large"], "max": 5}))
    with pytest.raises(SettingError, match=r"^worker_pools.x.instance_types: 'g6\.xlarge' can't be in a cluster pl"):
        plan(cloud, worker_count=1, **pools(x={"instance_types": ["g6.xlarge"], "max": 2}))


def test_a_type_of_several_pools_is_described_once(cloud: Cloud) -> None:
    cloud.answers = {}
    plan(cloud, **pools(a={"instance_types": ["g5.xlarge"], "max": 1, "spot": True}, b=H100, c=H100))
    asked = [args["instanceType"] for token, args in cloud.calls if token.endswith(":getInstanceType")]
    assert sorted(asked) == ["g5.xlarge", "m5.large", "p5.48xlarge"]
    cloud.answers = {"getInstanceType": {"supportedUsagesClasses": ["on-demand"]}}
    with pytest.raises(SettingError, match=r"^worker_pools.a.instance_types: 'g5\.xlarge' is sold as on-demand"):
        plan(cloud, **pools(a={"instance_types": ["g5.xlarge"], "max": 1, "spot": True}))


def test_no_look_up_is_made_twice(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(owner: Any, call: str) -> Callable[..., Any]:
        answer = owner(call)
        return lambda **asked: cloud.calls.append((call, asked)) or answer(**asked)

    for call in ("get_products", "describe_spot_price_history"):
        monkeypatch.setattr(cloud, call, recorded(partial(getattr, cloud), call))
    of_s3 = FakeS3.__getattr__
    monkeypatch.setattr(FakeS3, "__getattr__", lambda s3, call: recorded(partial(of_s3, s3), call))
    cloud.prices = dict.fromkeys(("c6i.2xlarge", "g5.xlarge", "g6.xlarge"), 1.0)
    policy, zones = f"arn:aws:iam::{ACCOUNT}:policy/a", ["us-west-2a", "us-west-2c"]
    plan(
        cloud,
        permissions_boundary=policy,
        task_policy_arns=(policy,),
        instance_policy_arns=(policy,),
        bucket_name="my-runs",
        data_buckets=("my-data/a", "my-data/b"),
        nat_gateway=False,
        head_instance_type="c6i.2xlarge",
        spot=True,
        max_hourly_usd=1000,
        worker_pools={
            "a": {"instance_types": ["g5.xlarge"], "zones": zones, "max": 2},
            "b": {"instance_types": ["g6.xlarge"], "zones": zones, "max": 2, "spot": True},
        },
        **CPU_WORKERS,
    )
    asked = Counter(f"{call} {json.dumps(given, sort_keys=True, default=str)}" for call, given in cloud.calls)
    assert [call for call, times in asked.items() if times > 1] == []
    called = {call.rpartition(":")[2] for call, _ in cloud.calls}
    assert called >= {"getPolicy", "getServiceQuota", "get_products", "describe_spot_price_history", "head_bucket"}


def test_a_preview_has_a_line_for_each_pool(cloud: Cloud) -> None:
    cloud.prices = {"m5.large": 1.0, "g5.xlarge": 2.0, "p5.48xlarge": 50.0, "c6i.2xlarge": 0.5}
    cloud.disk_price = 0.0001
    settings = {
        **CPU_WORKERS,
        **pools(
            h100={**H100, "zones": ["us-west-2a", "us-west-2c"], "spot": True, "on_demand": 1, "efa": "auto"},
            idle={"instance_types": ["p5.48xlarge"], "zones": ["us-west-2b"]},
            prepare={"instance_types": ["c6i.2xlarge"], "max": 2},
            s={**H100, "spot": True, "max": 3, "efa": "auto"},
        ),
    }
    plan(cloud, **settings)
    assert not cloud.messages
    cloud.preview = True
    cluster = plan(cloud, **settings)
    months = idle_cost.lines(cluster.costs, cluster.nodes, cluster.scales)
    assert cloud.messages == [
        "head: 1 x m5.large, 1 on demand, at most 1.00 USD per hour",
        "pool default: 2 x g5.xlarge with 250 GB local disks, 2 on demand, at most 4.00 USD per hour",
        "pool h100: 2 x p5.48xlarge with 32 EFA each and 30,400 GB local disks, 1 on spot and 1 on demand, "
        "at most 100.00 USD per hour",
        "pool prepare: 2 x c6i.2xlarge (CPU workers), 2 on demand, at most 1.00 USD per hour",
        "pool s: 3 x p5.48xlarge with 32 EFA each and 30,400 GB local disks, 3 on spot, at most 150.00 USD per hour",
        "all instances: at most 256.00 USD per hour",
        *months,
    ]
    assert months
    cloud.prices, cloud.messages = None, []
    plan(cloud)
    assert [line.rpartition(", ")[2] for line in cloud.messages] == ["cost unknown"] * 2 + [
        "all instances: cost unknown"
    ]


def test_the_smallest_disk_holds_the_machine_image(cloud: Cloud) -> None:
    cloud.answers = {
        "getAmi": {"blockDeviceMappings": [{"deviceName": "/dev/xvda", "ebs": {"volume_size": "80"}}]},
    }
    cpu = {"instance_types": ["c6i.large"], "max": 1}
    assert plan(cloud, **pools(prep=cpu))
    with pytest.raises(
        SettingError, match=r"^head_ami_id: .* has a root volume of more than worker_pools.prep.root_vol"
    ):
        plan(cloud, head_ami_id="ami-0abc", **pools(prep={**cpu, "root_volume_gib": 60}))


def test_spot_of_a_pool_needs_its_role(cloud: Cloud, warnings: list[str]) -> None:
    cloud.absent = ("getRole",)
    plan(cloud, **pools(h100={**H100, "spot": True}))
    assert warnings[0].startswith("worker_pools.h100.spot: 'AWSServiceRoleForEC2Spot' could not be found (")
