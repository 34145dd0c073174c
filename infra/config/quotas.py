"""Service quota checks: EC2 vCPUs, VPCs and Elastic IP addresses. EC2 itself refuses only at launch.

EC2 counts the vCPUs of running instances per region and group of families, on demand and spot separately. Other
instances of the account count as well, which this check does not see.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-on-demand-instances.html
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-spot-limits.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.errors import SettingError, error_reason
from infra.tags import stack_tags
from infra.types import NodeSpec


@dataclass(frozen=True, kw_only=True)
class Quota:
    """Quota in Service Quotas; a vCPU quota counts some instance families, on demand or spot."""

    code: str
    name: str
    families: str = ""
    spot: bool = False
    service: str = "ec2"


STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"
STANDARD_FAMILIES = "a|c|d|h|i|im|is|m|r|t|z"
QUOTAS = (
    Quota(code="L-DB2E81BA", name="Running On-Demand G and VT instances", families="g|gr|vt"),
    Quota(code="L-417A185B", name="Running On-Demand P instances", families="p"),
    Quota(code="L-1216C47A", name=f"Running On-Demand {STANDARD} instances", families=STANDARD_FAMILIES),
    Quota(code="L-3819A6DF", name="All G and VT Spot Instance Requests", families="g|gr|vt", spot=True),
    Quota(code="L-C4BD4855", name="All P5 Spot Instance Requests", families="p(?=5)", spot=True),
    Quota(code="L-7212CCBC", name="All P4, P3 and P2 Spot Instance Requests", families="p(?=[234])", spot=True),
    Quota(code="L-34B43A08", name=f"All {STANDARD} Spot Instance Requests", families=STANDARD_FAMILIES, spot=True),
)
# Quotas of which a new VPC takes one, with the current usage.
# https://docs.aws.amazon.com/vpc/latest/userguide/amazon-vpc-limits.html
VPCS = Quota(code="L-F678F1CE", name="VPCs per Region", service="vpc")
ADDRESSES = Quota(code="L-0263D0A3", name="EC2-VPC Elastic IPs")
NETWORK_QUOTAS: dict[Quota, Callable[[pulumi.InvokeOptions | None], int]] = {
    VPCS: lambda opts: len(aws.ec2.get_vpcs(opts=opts).ids),
    ADDRESSES: lambda opts: len(aws.ec2.get_eips(opts=opts).allocation_ids),
}


def check(
    region: str,
    *nodes: NodeSpec,
    new_network: bool,
    nat_gateway: bool = True,
    opts: pulumi.InvokeOptions | None = None,
) -> None:
    """Raise a SettingError for a cluster beyond a quota; warn once about quotas that can't be read.

    Args:
        region: Region of the cluster, for the messages.
        nodes: Head, workers and CPU workers.
        new_network: True if a VPC will be created.
        nat_gateway: True if the VPC gets a NAT gateway, which takes an Elastic IP address.
        opts: AWS provider for the calls.
    """
    unread: list[str] = []
    for quota in QUOTAS:
        vcpus = [(node, _vcpus(node, quota)) for node in nodes]
        counted = [(node, number) for node, number in vcpus if number]
        if not counted:
            continue
        with _noted(quota, unread):
            allowed = _allowed(quota, opts)
            needed = sum(number for _, number in counted)
            if needed > allowed:
                _refuse(counted, quota, region, needed, allowed)
    for quota, count in NETWORK_QUOTAS.items() if new_network else ():
        if quota is ADDRESSES and not nat_gateway:
            continue
        with _noted(quota, unread):
            allowed = _allowed(quota, opts)
            used = count(opts)
            if used >= allowed and not is_deployed(opts):
                _refuse_network(quota, region, used, allowed)
    if unread:
        quotas = ", ".join(unread)
        pulumi.log.warn(
            f"quotas in {region} could not be read with servicequotas:GetServiceQuota: {quotas}; continuing"
        )


def quota_of(instance_type: str, *, spot: bool = False) -> Quota | None:
    """Quota that counts an instance type; None for families outside QUOTAS."""
    for quota in QUOTAS:
        if quota.spot == spot and re.match(rf"({quota.families})\d", instance_type):
            return quota
    return None


def _vcpus(node: NodeSpec, quota: Quota) -> int:
    """Maximum vCPUs of a node's instances that count against a quota, whichever of its types EC2 launches."""
    counted = [instance.vcpus for instance in node.instances if quota_of(instance.name, spot=quota.spot) is quota]
    return max(counted, default=0) * (node.spot_count if quota.spot else node.on_demand_count)


@contextmanager
def _noted(quota: Quota, unread: list[str]) -> Generator[None]:
    """Collect a quota that AWS does not report."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:  # The SDK raises a bare Exception for every error of the provider.
        unread.append(f"{quota.name!r} ({error_reason(error)})")


def _allowed(quota: Quota, opts: pulumi.InvokeOptions | None) -> float:
    answer = aws.servicequotas.get_service_quota(service_code=quota.service, quota_code=quota.code, opts=opts)
    return float(answer.value)


def is_deployed(opts: pulumi.InvokeOptions | None = None) -> bool:
    """True if a security group has the tag of this project or stack: after a rename, or a failed `pulumi up`."""
    return any(aws.ec2.get_security_groups(tags={key: value}, opts=opts).ids for key, value in stack_tags().items())


def _refuse_network(quota: Quota, region: str, used: int, allowed: float) -> None:
    problem = f"is empty, so a VPC is created, but {region} has {used} of {allowed:g} {quota.name}"
    hint = (
        f"request an increase in Service Quotas ({quota.code}), delete one, use an existing network (vpcId and "
        "subnetIds), or set checkQuotas to false"
    )
    raise SettingError("vpcId", "", problem, hint)


def _refuse(counted: list[tuple[NodeSpec, int]], quota: Quota, region: str, needed: int, allowed: float) -> None:
    # The largest group is where the user can save most, so the error names its key.
    largest, _ = max(counted, key=lambda pair: pair[1])
    instances = " and ".join(str(node) for node, _ in counted)
    problem = f"needs {needed} vCPUs for {instances}, but the quota {quota.name!r} in {region} is {allowed:g}"
    hint = (
        f"request an increase in Service Quotas ({quota.code}), use fewer (workerCount, maxWorkers, cpuWorkerCount, "
        "maxCpuWorkers) or smaller instances, or set checkQuotas to false"
    )
    raise SettingError(largest.key, ",".join(largest.instance_types), problem, hint)
