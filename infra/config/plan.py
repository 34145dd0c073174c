"""What follows from the settings once AWS has been asked: location, sizes and costs, held against quotas and limits.

What cannot work is refused here, in a preview, before anything exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pulumi
import pulumi_aws as aws

from infra.config import account, docker, identity, prices, quotas
from infra.config.location import Remembered, ask_caller, check_account, locate, remember
from infra.config.settings import Settings
from infra.definitions.sizing import InstanceType, cpu_worker_size, head_size, worker_size
from infra.definitions.subnets import private_addresses
from infra.definitions.user_data import ami_parameter
from infra.errors import SettingError, error_reason
from infra.references import ExistingNetwork, Location, NodeSpec


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where the stack runs and what of.

    Attributes:
        location: Region and zones.
        head: The head's node.
        worker: A worker's node.
        cpu_worker: A CPU worker's node, or None where there are no CPU workers.
        gpus: How many GPUs a job requests by default.
        identity: Everything that can't change while the stack is up.
        up: The stack as it is up, or None.
    """

    location: Location
    head: NodeSpec
    worker: NodeSpec
    cpu_worker: NodeSpec | None
    gpus: int
    identity: Mapping[str, str] = field(default_factory=dict)
    up: Remembered | None = None

    @property
    def region(self) -> str:
        """Region of everything."""
        return self.location.region

    @property
    def hourly_usd(self) -> float | None:
        """Cost of the instances an hour at most, in USD on demand, or None where AWS would not say.

        Prices on spot change by the hour: an output with them would make every preview one with changes.
        """
        nodes = filter(None, [self.head, self.worker, self.cpu_worker])
        return prices.estimate(*(replace(node, spot_count=0) for node in nodes))


def make_plan(settings: Settings, prefix: str, network: ExistingNetwork | None = None) -> Plan:
    """Ask AWS about the settings.

    Args:
        settings: The settings.
        prefix: What the names of the cluster's components begin with.
        network: One that the same program makes, in place of the settings'.

    Raises:
        SettingError: They cannot work.
    """
    caller = ask_caller()
    region = caller.region
    check_account(caller.account)
    up, others = remember(prefix)
    identity.check_roles(settings, caller, prefix)
    if not settings.image_uri and pulumi.runtime.is_dry_run():
        docker.check(is_up=up is not None)
    if settings.image_uri and "@" not in settings.image_uri:
        pulumi.log.warn(
            f"imageUri: the tag of {settings.image_uri} may move, and then instances run different images; "
            "repository@sha256:digest can't"
        )
    account.check(settings, region, caller.account)
    location = locate(settings, caller, up, network, others)
    nodes = [_head(settings, location), _worker(settings, location)]
    if settings.cpu_worker_instance_types:
        nodes.append(_cpu_worker(settings, location, nodes[0].ami_id))
    if settings.check_quotas:
        new_network = not (up or location.existing)
        quotas.check(region, *nodes, new_network=new_network, nat_gateway=settings.nat_gateway)
    head, worker, *cpu_workers = nodes = prices.look_up(region, *nodes, spot=settings.max_hourly_usd > 0)
    prices.check(settings.max_hourly_usd, *nodes)
    _check_room(settings, location, sum(node.max_count for node in nodes))
    gpus = settings.workers.default_job_count * worker.task.gpus
    return Plan(
        location=location,
        head=head,
        worker=worker,
        cpu_worker=next(iter(cpu_workers), None),
        gpus=gpus,
        identity=identity.identity(settings, location, network),
        up=up,
    )


def _check_room(settings: Settings, location: Location, nodes: int) -> None:
    """Refuse a VPC with too few addresses: each node takes one for its instance and one for its task."""
    zones = len(location.zones)
    room = private_addresses(settings.vpc_cidr, zones)
    if not location.existing and room < 2 * nodes:
        problem = (
            f"has {room} addresses in the private subnet of each of {zones} zones, and {nodes} nodes take two each"
        )
        raise SettingError("vpcCidr", settings.vpc_cidr, problem, "give a larger one, such as 10.0.0.0/16")


def get_instance_types(key: str, names: Sequence[str], region: str) -> tuple[InstanceType, ...]:
    """Ask EC2 for the facts of the types that stand under a configuration key."""
    return tuple(get_instance_type(key, name, region) for name in names)


def get_instance_type(key: str, name: str, region: str) -> InstanceType:
    """Ask EC2 for the facts of the type that stands under a configuration key."""
    try:
        found = aws.ec2.get_instance_type(instance_type=name)
    except Exception as error:  # The SDK raises a bare Exception for whatever the provider answers.
        problem = f"could not be looked up in {region} ({error_reason(error)})"
        raise SettingError(key, name, problem, "give an instance type that this region offers") from error
    gpu = found.gpuses[0] if found.gpuses else None
    return InstanceType(
        name=name,
        vcpus=found.default_vcpus,
        memory_mib=found.memory_size,
        architectures=tuple(found.supported_architectures),
        gpus=sum(gpu.count for gpu in found.gpuses),
        gpu_name=gpu.name if gpu else "",
        gpu_memory_mib=gpu.memory_size if gpu else 0,
        gpu_manufacturer=gpu.manufacturer if gpu else "",
    )


def _newest_ami(key: str, *, gpu: bool) -> str:
    """Ask for AWS's newest machine image for ECS."""
    name = ami_parameter(gpu=gpu)
    try:
        # Not `value`: that one is a secret, and would hide the whole launch template in previews.
        return aws.ssm.get_parameter(name=name).insecure_value
    except Exception as error:
        problem = (
            f"is empty, and AWS's newest image can't be asked for (ssm:GetParameter of {name}: {error_reason(error)})"
        )
        raise SettingError(key, "", problem, "let the caller ask, or give a machine image") from error


def _head(settings: Settings, location: Location) -> NodeSpec:
    key = "headInstanceType"
    instances = get_instance_types(key, [settings.head_instance_type], location.region)
    return NodeSpec(
        key=key,
        instances=instances,
        task=head_size(key, instances),
        max_count=1,
        zones=(location.zone,),
        ami_id=settings.head_ami_id or _newest_ami("headAmiId", gpu=False),
    )


def _worker(settings: Settings, location: Location) -> NodeSpec:
    key = "workerInstanceTypes"
    instances = get_instance_types(key, settings.worker_instance_types, location.region)
    _compare_gpus(key, instances)
    most = settings.workers.max_count
    return NodeSpec(
        key=key,
        instances=instances,
        task=worker_size(key, instances),
        max_count=most,
        zones=location.worker_zones,
        spread=settings.spread_zones,
        spot_count=max(most - settings.on_demand_workers, 0) if settings.spot else 0,
        ami_id=settings.worker_ami_id or _newest_ami("workerAmiId", gpu=True),
    )


def _compare_gpus(key: str, instances: Sequence[InstanceType]) -> None:
    """Point out types with other GPUs: a run on both has the speed of the slower, with the memory of the smaller."""
    gpus = {each.name: f"{each.gpu_name} with {each.gpu_memory_mib // 1024} GiB" for each in instances}
    if len(set(gpus.values())) > 1:
        found = ", ".join(f"{name} has {gpu}" for name, gpu in gpus.items())
        pulumi.log.warn(
            f"{key}: {found}; a run on both goes at the speed of the slower, with the memory of the smaller"
        )


def _cpu_worker(settings: Settings, location: Location, ami_id: str) -> NodeSpec:
    key = "cpuWorkerInstanceTypes"
    instances = get_instance_types(key, settings.cpu_worker_instance_types, location.region)
    return NodeSpec(
        key=key,
        instances=instances,
        task=cpu_worker_size(key, instances),
        max_count=settings.cpu_workers.max_count,
        zones=(location.zone,),
        ami_id=ami_id,
    )
