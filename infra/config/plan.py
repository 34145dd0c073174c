"""What follows from the settings once AWS has been asked: location, sizes and costs, held against quotas and limits.

What cannot work is refused here, in a preview, before anything exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pulumi
import pulumi_aws as aws

from infra.config import account, identity, prices, quotas
from infra.config.location import Remembered, ask_caller, locate, remember
from infra.config.settings import Settings
from infra.definitions.sizing import InstanceType, cpu_worker_size, head_size, worker_size
from infra.definitions.subnets import private_addresses
from infra.definitions.user_data import ami_parameter
from infra.errors import SettingError, error_reason
from infra.references import ExistingNetwork, Location, NodeSpec, Scale, known


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where the stack runs and what of.

    Attributes:
        location: Region and zones.
        head: The head's node.
        worker: A worker's node.
        cpu_worker: A CPU worker's node, or None where there are no CPU workers.
        scales: Number of GPU and CPU workers, by kind.
        gpus: How many GPUs a job requests by default.
        identity: Everything that can't change while the stack is up.
        up: The stack as it is up, or None.
        default_tags: Tags that the provider adds to what it makes.
    """

    location: Location
    head: NodeSpec
    worker: NodeSpec
    cpu_worker: NodeSpec | None
    scales: Mapping[str, Scale]
    gpus: int
    identity: Mapping[str, str] = field(default_factory=dict)
    up: Remembered | None = None
    default_tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def region(self) -> str:
        """Region of everything."""
        return self.location.region

    @property
    def nodes(self) -> dict[str, NodeSpec]:
        """The kinds of nodes."""
        nodes = {"head": self.head, "workers": self.worker}
        return {**nodes, "cpu-workers": self.cpu_worker} if self.cpu_worker else nodes

    @property
    def hourly_usd(self) -> float | None:
        """Cost of the instances an hour at most, in USD on demand, or None where AWS would not say.

        Prices on spot change by the hour: an output with them would make every preview one with changes.
        """
        return prices.estimate(*(replace(node, spot_count=0) for node in self.nodes.values()))


def make_plan(
    settings: Settings,
    prefix: str,
    network: ExistingNetwork | None = None,
    opts: pulumi.InvokeOptions | None = None,
) -> Plan:
    """Ask AWS about the settings.

    Args:
        settings: The settings.
        prefix: What the names of the cluster's components begin with.
        network: One that the same program makes, in place of the settings'.
        opts: The provider to ask.

    Raises:
        SettingError: They cannot work.
    """
    caller = ask_caller(opts)
    region = caller.region
    up, others = remember(prefix, opts)
    identity.check_roles(settings, caller, prefix, opts)
    image_uri = known(settings.image_uri)
    if image_uri and "@" not in image_uri:
        pulumi.log.warn(
            f"imageUri: the tag of {image_uri} may move, and then instances run different images; "
            "repository@sha256:digest can't"
        )
    account.check(settings, region, caller.account, opts)
    location = locate(settings, caller, up, network, others, opts)
    nodes = [_head(settings, location, opts), _worker(settings, location, opts)]
    if settings.cpu_worker_instance_types:
        nodes.append(_cpu_worker(settings, location, nodes[0].ami_id, opts))
    if settings.check_quotas:
        new_network = not (up or location.existing)
        quotas.check(region, *nodes, new_network=new_network, nat_gateway=settings.nat_gateway, opts=opts)
    head, worker, *cpu_workers = nodes = prices.look_up(region, *nodes, spot=settings.max_hourly_usd > 0)
    prices.check(settings.max_hourly_usd, *nodes)
    _check_room(settings, location, sum(node.max_count for node in nodes))
    gpus = settings.workers.default_job_count * worker.task.gpus
    return Plan(
        location=location,
        head=head,
        worker=worker,
        cpu_worker=next(iter(cpu_workers), None),
        scales={"workers": settings.workers, **({"cpu-workers": settings.cpu_workers} if cpu_workers else {})},
        gpus=gpus,
        identity=identity.identity(settings, location, network),
        up=up,
        default_tags=aws.get_default_tags(opts=opts).tags,
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


def get_instance_types(
    key: str, names: Sequence[str], region: str, opts: pulumi.InvokeOptions | None = None
) -> tuple[InstanceType, ...]:
    """Ask EC2 for the facts of the types that stand under a configuration key."""
    return tuple(get_instance_type(key, name, region, opts) for name in names)


def get_instance_type(key: str, name: str, region: str, opts: pulumi.InvokeOptions | None = None) -> InstanceType:
    """Ask EC2 for the facts of the type that stands under a configuration key."""
    try:
        found = aws.ec2.get_instance_type(instance_type=name, opts=opts)
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


def _newest_ami(key: str, opts: pulumi.InvokeOptions | None, *, gpu: bool) -> str:
    """Ask for AWS's newest machine image for ECS."""
    name = ami_parameter(gpu=gpu)
    try:
        # Not `value`: that one is a secret, and would hide the whole launch template in previews.
        return aws.ssm.get_parameter(name=name, opts=opts).insecure_value
    except Exception as error:
        problem = (
            f"is empty, and AWS's newest image can't be asked for (ssm:GetParameter of {name}: {error_reason(error)})"
        )
        raise SettingError(key, "", problem, "let the caller ask, or give a machine image") from error


def _head(settings: Settings, location: Location, opts: pulumi.InvokeOptions | None) -> NodeSpec:
    key = "headInstanceType"
    instances = get_instance_types(key, [settings.head_instance_type], location.region, opts)
    return NodeSpec(
        key=key,
        instances=instances,
        task=head_size(key, instances),
        max_count=1,
        zones=(location.zone,),
        ami_id=settings.head_ami_id or _newest_ami("headAmiId", opts, gpu=False),
    )


def _worker(settings: Settings, location: Location, opts: pulumi.InvokeOptions | None) -> NodeSpec:
    key = "workerInstanceTypes"
    instances = get_instance_types(key, settings.worker_instance_types, location.region, opts)
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
        ami_id=settings.worker_ami_id or _newest_ami("workerAmiId", opts, gpu=True),
    )


def _compare_gpus(key: str, instances: Sequence[InstanceType]) -> None:
    """Point out types with other GPUs: a run on both has the speed of the slower, with the memory of the smaller."""
    gpus = {each.name: f"{each.gpu_name} with {each.gpu_memory_mib // 1024} GiB" for each in instances}
    if len(set(gpus.values())) > 1:
        found = ", ".join(f"{name} has {gpu}" for name, gpu in gpus.items())
        pulumi.log.warn(
            f"{key}: {found}; a run on both goes at the speed of the slower, with the memory of the smaller"
        )


def _cpu_worker(settings: Settings, location: Location, ami_id: str, opts: pulumi.InvokeOptions | None) -> NodeSpec:
    key = "cpuWorkerInstanceTypes"
    instances = get_instance_types(key, settings.cpu_worker_instance_types, location.region, opts)
    return NodeSpec(
        key=key,
        instances=instances,
        task=cpu_worker_size(key, instances),
        max_count=settings.cpu_workers.max_count,
        zones=(location.zone,),
        ami_id=ami_id,
    )
