"""Cluster plan from settings and AWS's answers, and refused settings."""

from __future__ import annotations

from typing import Any

import pytest

from infra.config import RayClusterArgs
from infra.config.plan import Plan, make_plan
from infra.definitions.sizing import TaskSize
from infra.errors import SettingError, error_reason
from infra.types import Price
from tests.infra.fake_aws import CLUSTER, REGION, Cloud

ZONES = ["us-west-2a", "us-west-2a"]

# USD per hour of the disks' throughput: 441, 292 and 625 MiB/s of 40.96 USD per GiB/s and month.
HEAD_DISK, WORKER_DISK, CPU_DISK = 0.0242, 0.016, 0.0342


def plan(cloud: Cloud, **settings: Any) -> Plan:
    """The plan that follows from otherwise default settings."""
    return cloud.run(lambda: make_plan(RayClusterArgs(**settings), CLUSTER))


def test_default_plan_has_two_gpus_in_one_zone(cloud: Cloud) -> None:
    made = plan(cloud)
    assert made.location.region == REGION
    assert made.location.candidates == ("us-west-2a", "us-west-2b", "us-west-2c")
    assert (made.nodes["head"].instance_types, made.nodes["head"].max_count) == (("m5.xlarge",), 1)
    assert made.nodes["head"].prices == {"m5.xlarge": Price(on_demand=0.192 + HEAD_DISK)}
    assert made.nodes["head"].task == TaskSize(vcpus=4, memory_mib=14336, gpus=0)
    assert (made.nodes["workers"].instance_types, made.nodes["workers"].max_count) == (("g5.xlarge",), 2)
    assert made.nodes["workers"].prices == {"g5.xlarge": Price(on_demand=1.006 + WORKER_DISK)}
    assert made.nodes.keys() == made.scales.keys() | {"head"} == {"head", "workers"}
    assert made.nodes["workers"].task == TaskSize(vcpus=4, memory_mib=14336, gpus=1)
    assert made.gpus == 2
    assert made.hourly_usd == pytest.approx(0.192 + HEAD_DISK + 2 * (1.006 + WORKER_DISK))


def test_train_command_requests_all_gpus(cloud: Cloud) -> None:
    made = plan(cloud, worker_instance_types=("g5.12xlarge",), worker_count=4, check_quotas=False)
    assert (made.nodes["workers"].task.gpus, made.gpus) == (4, 16)
    assert plan(cloud, max_workers=8).gpus == 2


@pytest.mark.parametrize(("settings", "workers"), [({}, 2), ({"max_workers": 5}, 5), ({"worker_count": 0}, 0)])
def test_estimate_counts_the_maximum_of_workers(cloud: Cloud, settings: dict[str, int], workers: int) -> None:
    assert plan(cloud, **settings).hourly_usd == pytest.approx(0.192 + HEAD_DISK + workers * (1.006 + WORKER_DISK))


def test_estimate_adds_head_and_workers_of_one_type(cloud: Cloud) -> None:
    assert plan(cloud, head_instance_type="g5.xlarge").hourly_usd == pytest.approx(3 * (1.006 + WORKER_DISK))


def test_cost_above_the_limit_is_refused(cloud: Cloud) -> None:
    with pytest.raises(SettingError) as refused:
        plan(cloud, max_hourly_usd=2.26)
    assert str(refused.value) == (
        "max_hourly_usd: 2.26 is below the 2.2602 USD per hour of 1 x m5.xlarge and 2 x g5.xlarge; "
        "raise it, or use fewer (worker_count, max_workers, cpu_worker_count, max_cpu_workers) or smaller instances"
    )
    assert plan(cloud, max_hourly_usd=2.27).hourly_usd == pytest.approx(2.2602)


def test_without_prices_there_is_no_estimate(cloud: Cloud, warnings: list[str]) -> None:
    cloud.prices = None
    assert plan(cloud).hourly_usd is None
    [line] = warnings
    assert "pricing:GetProducts" in line


def test_cost_limit_without_prices_is_refused(cloud: Cloud, warnings: list[str]) -> None:
    cloud.prices = None
    with pytest.raises(SettingError, match=r"^max_hourly_usd: 5\.0 can't be checked without prices; "):
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


def test_vcpus_beyond_the_quota_are_refused(cloud: Cloud) -> None:
    with pytest.raises(SettingError) as refused:
        plan(cloud, worker_instance_types=("g5.12xlarge",), worker_count=4)
    assert str(refused.value) == (
        "worker_instance_types: 'g5.12xlarge' needs 192 vCPUs for 4 x g5.12xlarge, but the quota 'Running On-Demand G "
        "and VT instances' in us-west-2 is 64; request an increase in Service Quotas (L-DB2E81BA), use "
        "fewer (worker_count, max_workers, cpu_worker_count, max_cpu_workers) or smaller instances, or set "
        "check_quotas to false"
    )


def test_check_quotas_false_reads_no_quotas(cloud: Cloud) -> None:
    plan(cloud, worker_instance_types=("p4d.24xlarge",), check_quotas=False)
    assert not [token for token, _ in cloud.calls if token.endswith(":getServiceQuota")]


def test_unknown_instance_type_is_refused_with_cause(cloud: Cloud) -> None:
    cloud.answers = {"getInstanceTypeOfferings": {"instanceTypes": ["g99.huge", "m5.xlarge"], "locations": ZONES}}
    with pytest.raises(SettingError) as refused:
        plan(cloud, worker_instance_types=("g99.huge",))
    message = str(refused.value)
    assert message.startswith("worker_instance_types: 'g99.huge' could not be found (")
    assert "g99.huge does not exist" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("worker", "rule"),
    [("p3dn.24xlarge", "V100"), ("g5g.xlarge", "arm64"), ("m5.xlarge", "whole GPU"), ("g6f.large", "whole GPU")],
)
def test_a_worker_type_without_usable_gpus_is_refused(cloud: Cloud, worker: str, rule: str) -> None:
    with pytest.raises(SettingError, match=rule):
        plan(cloud, worker_instance_types=(worker,))


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


@pytest.mark.parametrize(("image_uri", "builds"), [("", True), ("public.example/ray@sha256:" + 64 * "a", False)])
def test_docker_is_checked_if_an_image_is_built(cloud: Cloud, image_uri: str, builds: bool) -> None:
    cloud.image_problem = NO_DOCKER
    assert plan(cloud, image_uri=image_uri, image_build="local").image_problem is (NO_DOCKER if builds else None)


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
    made = plan(cloud, image_build=image_build)
    assert (made.image_builder, made.image_problem) == (builder, refused)


@pytest.mark.parametrize("image_build", ["auto", "local", "codebuild"])
def test_a_ready_image_has_no_builder(cloud: Cloud, image_build: str) -> None:
    cloud.image_problem = NO_DOCKER
    made = plan(cloud, image_build=image_build, image_uri="public.example/ray@sha256:" + 64 * "a")
    assert (made.image_builder, made.image_problem) == ("", None)


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
    made = plan(cloud, spot=True)
    assert (made.nodes["workers"].spot_count, made.nodes["workers"].on_demand_count) == (2, 0)
    assert made.hourly_usd == pytest.approx(0.192 + HEAD_DISK + 2 * (1.006 + WORKER_DISK))
    assert plan(cloud, spot=True, max_hourly_usd=1.05)
    with pytest.raises(SettingError, match=r"^max_hourly_usd: 1\.0 is below the 1\.6542 USD per hour of"):
        plan(cloud, spot=True, on_demand_workers=1, max_hourly_usd=1.0)
    cloud.spot_prices = None
    with pytest.raises(SettingError, match=r"^max_hourly_usd: 1\.0 is below the 2\.2602 USD per hour of"):
        plan(cloud, spot=True, max_hourly_usd=1.0)
    assert "ec2:DescribeSpotPriceHistory" in warnings[0]


def test_spot_has_quotas_of_its_own(cloud: Cloud) -> None:
    cloud.quotas = {"L-DB2E81BA": 0.0}
    assert plan(cloud, spot=True)
    cloud.quotas = {"L-3819A6DF": 7.0}
    with pytest.raises(
        SettingError, match=r"8 vCPUs for 2 x g5\.xlarge \(2 on spot\), .*Service Quotas \(L-3819A6DF\)"
    ):
        plan(cloud, spot=True)


CPU_WORKERS: dict[str, Any] = {"cpu_worker_instance_types": ("c6i.2xlarge",)}


def test_cpu_workers_count_in_plan_cost_and_quota(cloud: Cloud) -> None:
    assert cloud.prices is not None
    cloud.prices["c6i.2xlarge"] = 0.34
    made = plan(cloud, **CPU_WORKERS, max_cpu_workers=3, cpu_worker_count=1)
    assert (
        made.nodes["cpu-workers"].max_count,
        made.nodes["cpu-workers"].task.vcpus,
        made.nodes["cpu-workers"].task.gpus,
    ) == (3, 8, 0)
    assert made.hourly_usd == pytest.approx(0.192 + HEAD_DISK + 2 * (1.006 + WORKER_DISK) + 3 * (0.34 + CPU_DISK))
    cloud.quotas = {"L-1216C47A": 4.0}
    with pytest.raises(
        SettingError, match=r"^cpu_worker_instance_types: 'c6i\.2xlarge' needs 28 vCPUs for 1 x m5\.xlarge and 3 x"
    ):
        plan(cloud, **CPU_WORKERS, cpu_worker_count=3)


def test_nat_gateway_off_requires_no_address(cloud: Cloud) -> None:
    cloud.quotas, cloud.addresses = {"L-0263D0A3": 5.0}, 5
    assert plan(cloud, nat_gateway=False)


def test_types_with_different_gpus_are_warned_about(cloud: Cloud, warnings: list[str]) -> None:
    cloud.prices = {"m5.xlarge": 0.2, "g5.xlarge": 1.0, "g5.2xlarge": 1.2, "g4dn.xlarge": 0.5}
    plan(cloud, worker_instance_types=("g5.xlarge", "g5.2xlarge"))
    assert not warnings
    plan(cloud, worker_instance_types=("g5.xlarge", "g4dn.xlarge"))
    [line] = warnings
    assert line.startswith(
        "worker_instance_types: g5.xlarge has A10G with 22 GiB, g4dn.xlarge has T4 with 16 GiB; a run on"
    )


RESOLVE = "resolve:ssm:/aws/service/ecs/optimized-ami/amazon-linux-2023/"


def test_instances_start_with_the_newest_ami(cloud: Cloud, warnings: list[str]) -> None:
    made = plan(cloud, **CPU_WORKERS)
    assert [node.ami_id for node in made.nodes.values()] == [
        f"{RESOLVE}{variant}recommended/image_id" for variant in ("", "gpu/", "")
    ]
    cloud.amis = {AMI: {}}
    made = plan(cloud, head_ami_id=AMI, worker_ami_id=AMI)
    assert {node.ami_id for node in made.nodes.values()} == {AMI}
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
