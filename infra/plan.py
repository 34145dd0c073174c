"""What follows from the settings once AWS has been asked: region, zone, and the size of each kind of task.

The calls are plain ones, as their answers shape what is planned: awsx.ec2.Vpc takes no outputs for its zones, and a
type that cannot work is refused before anything exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.settings import SettingError, Settings
from infra.sizing import InstanceType, TaskSize, head_size, worker_size

# The zones in which each instance type is offered.
Offerings = dict[str, set[str]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where the stack runs and what one task of each kind takes; `gpus` counts those of all workers."""

    region: str
    zone: str
    head: TaskSize
    worker: TaskSize
    gpus: int

    @classmethod
    def of(cls, settings: Settings) -> Plan:
        """Ask AWS about the settings; SettingError where they cannot work."""
        region = aws.get_region().region
        zone = choose_zone(settings, offerings(settings, region), region)
        head = head_size(instance_type("headInstanceType", settings.head_instance_type, region))
        worker = worker_size(instance_type("workerInstanceType", settings.worker_instance_type, region))
        return cls(region=region, zone=zone, head=head, worker=worker, gpus=settings.worker_count * worker.gpus)


def offerings(settings: Settings, region: str) -> Offerings:
    """Ask EC2 in which zones of the region it offers the two instance types.

    Local and Wavelength Zones (us-west-2-lax-1a) are left out: they sort first, and lack NAT gateways or GPU capacity.
    """
    types = {settings.head_instance_type, settings.worker_instance_type}
    try:
        found = aws.ec2.get_instance_type_offerings(
            location_type="availability-zone", filters=[{"name": "instance-type", "values": sorted(types)}]
        )
    except Exception as error:  # The SDK raises a bare Exception for whatever the provider answers.
        raise pulumi.RunError(
            f"EC2 in {region} does not tell which instance types it offers: {cause(error)}"
        ) from error
    zones: Offerings = {name: set() for name in types}
    for name, zone in zip(found.instance_types, found.locations, strict=True):
        if re.fullmatch(f"{region}[a-z]", zone):
            zones[name].add(zone)
    return zones


def choose_zone(settings: Settings, offered: Offerings, region: str) -> str:
    """Pick the zone; SettingError where no zone, or not the one that was asked for, offers both types."""
    head, worker = settings.head_instance_type, settings.worker_instance_type
    for key, name in (("headInstanceType", head), ("workerInstanceType", worker)):
        if not offered[name]:
            raise SettingError(key, name, f"is not offered in {region}", "give another type or another region")
    zones = sorted(offered[head] & offered[worker])
    if not zones:
        rule = f"is not offered together with {head} in any zone of {region}"
        raise SettingError("workerInstanceType", worker, rule, "give another type or another region")
    if not settings.availability_zone:
        return zones[0]
    if settings.availability_zone not in zones:
        way_out = f"give one of {', '.join(zones)}, or leave it empty to have one chosen"
        rule = f"does not offer {' and '.join(sorted({head, worker}))}"
        raise SettingError("availabilityZone", settings.availability_zone, rule, way_out)
    return settings.availability_zone


def instance_type(key: str, name: str, region: str) -> InstanceType:
    """Ask EC2 for the facts of the type that stands under a configuration key."""
    try:
        found = aws.ec2.get_instance_type(instance_type=name)
    except Exception as error:
        rule = f"could not be looked up in {region} ({cause(error)})"
        raise SettingError(key, name, rule, "give an instance type that this region offers") from error
    gpu = found.gpuses[0] if found.gpuses else None
    return InstanceType(
        name=name,
        vcpus=found.default_vcpus,
        memory_mib=found.memory_size,
        architectures=tuple(found.supported_architectures),
        gpus=sum(gpu.count for gpu in found.gpuses),
        gpu_name=gpu.name if gpu else "",
        gpu_manufacturer=gpu.manufacturer if gpu else "",
    )


def cause(error: Exception) -> str:
    """Find the line of a provider's answer that says why: where the answer is a list, it stands behind a bullet."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    bullets = [line.removeprefix("* ") for line in lines if line.startswith("* ")]
    return next(iter(bullets + lines), type(error).__name__)
