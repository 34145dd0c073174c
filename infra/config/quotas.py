"""The account's quotas, held against what the stack would start: EC2 itself says no only at a launch.

EC2 counts the vCPUs of running instances by group of families, in each region, on-demand apart from spot. What else
runs in the account counts, too, but that only EC2 knows.
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
from infra.references import NodeSpec
from infra.tags import stack_tags
from ray_on_ecs.contract import SPOT, VCPU_QUOTAS


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A quota as Service Quotas lists it; one of vCPUs counts those of some families, on demand or on spot."""

    code: str
    name: str
    families: str = ""
    spot: bool = False
    service: str = "ec2"


QUOTAS = tuple(
    Quota(code=code, name=name, families=families, spot=market == SPOT) for code, name, families, market in VCPU_QUOTAS
)
# What the VPC of a stack needs one of, and how many there are.
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
    """Refuse with a SettingError what the quotas don't allow; where one can't be read, say so once and go on.

    Args:
        region: The region.
        nodes: The kinds of nodes.
        new_network: Whether a VPC is to be made.
        nat_gateway: Whether it has a NAT gateway, with an Elastic IP address.
        opts: The provider to ask.
    """
    unread: list[str] = []
    for quota in QUOTAS:
        counted = [(each, vcpus) for each in nodes if (vcpus := _vcpus(each, quota))]
        if not counted:
            continue
        with _noted(quota, unread):
            allowed = _allowed(quota, opts)
            if (needed := sum(vcpus for _, vcpus in counted)) > allowed:
                _refuse(counted, quota, region, needed, allowed)
    for quota, count in NETWORK_QUOTAS.items() if new_network else ():
        if quota is ADDRESSES and not nat_gateway:
            continue
        with _noted(quota, unread):
            allowed = _allowed(quota, opts)
            if (there := count(opts)) >= allowed and not _has_network(opts):
                _refuse_network(quota, region, there, allowed)
    if unread:
        what = f"quotas in {region} could not be read with servicequotas:GetServiceQuota"
        pulumi.log.warn(f"{what}: {', '.join(unread)}; going on")


def quota_of(instance_type: str, *, spot: bool = False) -> Quota | None:
    """The quota that counts an instance type; None for families that no stack of this kind runs on."""
    of_market = (each for each in QUOTAS if each.spot == spot)
    return next((each for each in of_market if re.match(rf"({each.families})\d", instance_type)), None)


def _vcpus(node: NodeSpec, quota: Quota) -> int:
    """The most vCPUs of a node's instances that a quota counts, whichever of its types they turn out to be."""
    counted = [each.vcpus for each in node.instances if quota_of(each.name, spot=quota.spot) is quota]
    return max(counted, default=0) * (node.spot_count if quota.spot else node.on_demand_count)


@contextmanager
def _noted(quota: Quota, unread: list[str]) -> Generator[None]:
    """Note a question that AWS does not answer."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:  # The SDK raises a bare Exception for whatever the provider answers.
        unread.append(f"{quota.name!r} ({error_reason(error)})")


def _allowed(quota: Quota, opts: pulumi.InvokeOptions | None) -> float:
    answer = aws.servicequotas.get_service_quota(service_code=quota.service, quota_code=quota.code, opts=opts)
    return float(answer.value)


def _has_network(opts: pulumi.InvokeOptions | None) -> bool:
    """Return True if there is a VPC of this project or stack: after a rename, or an `up` that failed half-way."""
    return any(aws.ec2.get_vpcs(tags={key: value}, opts=opts).ids for key, value in stack_tags().items())


def _refuse_network(quota: Quota, region: str, there: int, allowed: float) -> None:
    problem = f"is empty, for a VPC of the stack's own, and {region} has {there} of {allowed:g} {quota.name}"
    hint = (
        f"ask for more under Service Quotas ({quota.code}), delete one, give an existing network (vpcId and "
        "subnetIds), or set checkQuotas to false to go on"
    )
    raise SettingError("vpcId", "", problem, hint)


def _refuse(counted: list[tuple[NodeSpec, int]], quota: Quota, region: str, needed: int, allowed: float) -> None:
    most, _ = max(counted, key=lambda each: each[1])
    instances = " and ".join(str(node) for node, _ in counted)
    problem = (
        f"needs {needed} vCPUs for {instances}, and the quota {quota.name!r} of this account in {region} is {allowed:g}"
    )
    hint = (
        f"ask for more under Service Quotas ({quota.code}), give fewer (workerCount, maxWorkers, cpuWorkerCount, "
        "maxCpuWorkers) or smaller instances, or set checkQuotas to false to go on"
    )
    raise SettingError(most.key, ",".join(most.instance_types), problem, hint)
