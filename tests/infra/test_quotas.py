"""Service quotas checks, and quotas that can't be read."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from infra.config import quotas
from infra.config.quotas import quota_of
from infra.errors import SettingError
from infra.types import NodeSpec
from tests.infra.fake_aws import REGION, Cloud, instance_type, instance_types, node_spec

G, P, STANDARD, SPOT_G, SPOT_P5, SPOT_P, SPOT_STANDARD = (quota.code for quota in quotas.QUOTAS)


def check(cloud: Cloud, *nodes: NodeSpec) -> None:
    """Hold the nodes against an account's quotas."""
    cloud.run(lambda: quotas.check(REGION, *nodes, new_network=False))


def workers(instance_type: str = "g5.xlarge", count: int = 2, vcpus: int = 4) -> NodeSpec:
    """Two small workers, unless said otherwise."""
    return node_spec(instance_type, count, vcpus=vcpus)


HEAD = node_spec("m5.xlarge", 1, key="headInstanceType")


def test_what_the_quota_allows_passes(cloud: Cloud) -> None:
    cloud.quotas = {G: 8.0, STANDARD: 4.0}
    check(cloud, HEAD, workers())


def test_one_vcpu_too_many_is_refused(cloud: Cloud) -> None:
    cloud.quotas = {G: 7.0}
    with pytest.raises(SettingError, match=r"needs 8 vCPUs for 2 x g5\.xlarge, .* is 7"):
        check(cloud, HEAD, workers())


def test_head_of_worker_family_shares_the_quota(cloud: Cloud) -> None:
    cloud.quotas = {G: 8.0}
    head = node_spec("g5.xlarge", 1, key="headInstanceType")
    with pytest.raises(SettingError, match=r"12 vCPUs for 1 x g5\.xlarge and 2 x g5\.xlarge") as refused:
        check(cloud, head, workers())
    assert str(refused.value).startswith("workerInstanceTypes")


def test_no_workers_need_no_quota(cloud: Cloud) -> None:
    cloud.quotas = {G: 0.0}
    check(cloud, HEAD, workers(count=0))
    assert [args["quotaCode"] for _, args in cloud.calls] == [STANDARD]


def test_unreadable_quotas_are_warned_about_once(cloud: Cloud, warnings: list[str]) -> None:
    cloud.silent = ("getServiceQuota",)
    check(cloud, HEAD, workers())
    [line] = warnings
    assert line.startswith("quotas in us-west-2 could not be read with servicequotas:GetServiceQuota: ")
    assert "AccessDenied" in line


def test_a_quota_without_a_value_is_not_read(cloud: Cloud, warnings: list[str]) -> None:
    cloud.quotas = {G: None, STANDARD: 0.0}
    with pytest.raises(SettingError, match=r"^headInstanceType: 'm5\.xlarge' needs 4 vCPUs .* is 0; "):
        check(cloud, HEAD, workers())
    cloud.quotas = {G: None}
    check(cloud, HEAD, workers())
    assert warnings[-1].endswith("'Running On-Demand G and VT instances' (no value); continuing")


@pytest.mark.parametrize(
    ("vpcs", "addresses", "what"), [(5, 4, "5 of 5 VPCs per Region"), (4, 5, "5 of 5 EC2-VPC Elastic IPs")]
)
def test_vpc_and_elastic_ip_quotas_are_checked(vpcs: int, addresses: int, what: str) -> None:
    quota = dict.fromkeys((item.code for item in quotas.USED), 5.0)
    full, room = Cloud(quotas=quota, vpcs=vpcs, addresses=addresses), Cloud(quotas=quota, vpcs=4, addresses=4)
    problem = str(full.run(lambda: quotas.check(REGION, HEAD, new_network=True)))
    assert re.match(f"vpc_id: '' is empty, .*us-west-2 has {what}; .*use an existing network", problem)
    assert room.run(lambda: quotas.check(REGION, HEAD, new_network=True)) is None
    assert full.run(lambda: quotas.check(REGION, HEAD, new_network=False)) is None


@pytest.mark.parametrize("call", ["getVpcs", "getEips"])
def test_unknown_use_of_a_network_quota_is_warned_about_once(call: str, warnings: list[str]) -> None:
    cloud = Cloud(quotas=dict.fromkeys((item.code for item in quotas.USED), 5.0), vpcs=4, addresses=5, silent=(call,))
    if call == "getVpcs":
        cloud.addresses = 4
    cloud.run(lambda: quotas.check(REGION, HEAD, new_network=True))
    [line] = warnings
    assert "AccessDenied" in line


@pytest.mark.parametrize(
    ("instance_type", "code"),
    [("g4dn.xlarge", G), ("g6e.48xlarge", G), ("gr6.4xlarge", G), ("p4d.24xlarge", P), ("p5.48xlarge", P),
     ("m5.xlarge", STANDARD), ("t3.large", STANDARD), ("im4gn.large", STANDARD), ("c7i.xlarge", STANDARD)],
)  # fmt: skip
def test_a_family_counts_against_its_quota(instance_type: str, code: str) -> None:
    quota = quota_of(instance_type)
    assert quota is not None
    assert quota.code == code


def test_every_gpu_type_of_nvidia_has_a_quota() -> None:
    for name, facts in instance_types().items():
        gpus = facts.get("GpuInfo", {}).get("Gpus", [])
        if gpus and gpus[0]["Manufacturer"] == "NVIDIA":
            assert quota_of(name) in quotas.QUOTAS[:2], f"no quota for {name}"


@pytest.mark.parametrize(
    ("instance_type", "code"),
    [("g4dn.xlarge", SPOT_G), ("gr6.4xlarge", SPOT_G), ("p4d.24xlarge", SPOT_P), ("p5en.48xlarge", SPOT_P5),
     ("c7i.xlarge", SPOT_STANDARD)],
)  # fmt: skip
def test_spot_counts_against_the_spot_quota(instance_type: str, code: str) -> None:
    quota = quota_of(instance_type, spot=True)
    assert quota is not None
    assert quota.code == code


def test_each_market_is_held_against_its_quota(cloud: Cloud) -> None:
    cloud.quotas = {G: 4.0, SPOT_G: 8.0}
    check(cloud, node_spec("g5.xlarge", 3, spot_count=2))
    cloud.quotas = {G: 4.0, SPOT_G: 7.0}
    with pytest.raises(SettingError, match=r"8 vCPUs for 3 x g5\.xlarge \(2 on spot\), .*All G and VT Spot"):
        check(cloud, node_spec("g5.xlarge", 3, spot_count=2))


def test_of_several_types_the_largest_has_to_fit(cloud: Cloud) -> None:
    cloud.quotas = {G: 8.0}
    types = (instance_type("g5.xlarge"), instance_type("g5.2xlarge", vcpus=8))
    with pytest.raises(SettingError, match=r"^workerInstanceTypes: 'g5\.xlarge,g5\.2xlarge' needs 16 vCPUs"):
        check(cloud, replace(workers(), instances=types))
