"""Service quotas: EC2 vCPUs, VPCs and Elastic IP addresses. EC2 itself refuses only at launch.

EC2 counts the vCPUs of running instances per region and group of families, on demand and spot separately. Other
instances of the account count as well, which this check does not see.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-on-demand-instances.html
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-spot-limits.html
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.config.together import together
from infra.config.worker_pool import counts_of
from infra.definitions import nat
from infra.definitions.sizing import InstanceType, TaskSize
from infra.errors import SettingError, error_reason, warn
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
# Quotas of which a new VPC takes one, with their use.
# https://docs.aws.amazon.com/vpc/latest/userguide/amazon-vpc-limits.html
VPCS = Quota(code="L-F678F1CE", name="VPCs per Region", service="vpc")
ADDRESSES = Quota(code="L-0263D0A3", name="EC2-VPC Elastic IPs")
USED: dict[Quota, Callable[[pulumi.InvokeOptions | None], int]] = {
    VPCS: lambda opts: len(aws.ec2.get_vpcs(opts=opts).ids),
    ADDRESSES: lambda opts: len(aws.ec2.get_eips(opts=opts).allocation_ids),
}
# EC2 counts the NAT instance like others. Its public address is not an Elastic IP address.
NAT_INSTANCE = NodeSpec(
    key="nat_instance",
    instances=(InstanceType(name=nat.INSTANCE_TYPE, vcpus=2, memory_mib=512, architectures=("arm64",)),),
    task=TaskSize(vcpus=0, memory_mib=0, gpus=0),
    max_count=1,
    zones=(),
)
HINT = "request an increase in Service Quotas ({}), {}, or set check_quotas to false"


def check(
    region: str,
    *nodes: NodeSpec,
    new_network: bool,
    nat_gateway: bool = True,
    nat_instance: bool = False,
    opts: pulumi.InvokeOptions | None = None,
) -> SettingError | None:
    """Raise a SettingError for head and workers beyond a quota; warn once about quotas that can't be read.

    Returns:
        The reason why AWS would refuse another network, which matters only to a new cluster.
    """
    unread, network_problem = [], None
    # A reservation has passed the quota with all its instances when it was made.
    counted = [node for node in nodes if not (node.shares or node.reservation)]
    counted += [NAT_INSTANCE] if nat_instance else []
    needed = {quota: [(node, _vcpus(node, quota)) for node in counted] for quota in QUOTAS}
    quotas = [quota for quota, vcpus in needed.items() if any(count for _, count in vcpus)]
    of_network = [VPCS, ADDRESSES] if nat_gateway and not nat_instance else [VPCS]
    quotas += of_network if new_network else []
    used_quotas = [quota for quota in quotas if quota in USED]
    get = partial(aws.servicequotas.get_service_quota, opts=opts)
    calls: list[Callable[[], Any]] = [
        partial(get, service_code=quota.service, quota_code=quota.code) for quota in quotas
    ]
    calls += [partial(USED[quota], opts) for quota in used_quotas]
    answers = together(*calls)
    uses = dict(zip(used_quotas, answers[len(quotas) :], strict=True))
    for quota, asked in zip(quotas, answers, strict=False):
        try:
            allowed = asked.result().value
            used = uses[quota].result() if quota in uses else 0
        except Exception as error:  # The SDK raises a bare Exception for every error of the provider.
            unread.append(f"{quota.name!r} ({error_reason(error)})")
            continue
        if allowed is None:
            unread.append(f"{quota.name!r} (no value)")
        elif quota in needed:
            _check_vcpus(quota, needed[quota], region, allowed)
        elif used >= allowed:
            problem = f"is empty, so a VPC is created, but {region} has {used} of {allowed:g} {quota.name}"
            less = "delete one, use an existing network (vpc_id and subnet_ids)"
            network_problem = SettingError("vpc_id", "", problem, HINT.format(quota.code, less))
    if unread:
        problem = f"quotas in {region} could not be read with servicequotas:GetServiceQuota"
        warn(f"{problem}: {', '.join(unread)}; continuing")
    return network_problem


def _check_vcpus(quota: Quota, vcpus: list[tuple[NodeSpec, int]], region: str, allowed: float) -> None:
    needed = sum(count for _, count in vcpus)
    if needed <= allowed:
        return
    # The largest pool is where the user can save most, so the error names its settings.
    largest, _ = max(vcpus, key=lambda pair: pair[1])
    instances = " and ".join(str(node) for node, count in vcpus if count)
    problem = f"needs {needed} vCPUs for {instances}, but the quota {quota.name!r} in {region} is {allowed:g}"
    less = f"use fewer ({counts_of(largest.pool)}) or smaller instances" if largest.pool else "use a smaller instance"
    raise SettingError(largest.key, ",".join(largest.instance_types), problem, HINT.format(quota.code, less))


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
