"""What follows from the settings once AWS has been asked: region, zone, and the size of each kind of task.

The calls are plain ones, as their answers shape what is planned: awsx.ec2.Vpc takes no outputs for its zones, and a
type that cannot work is refused before anything exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import pulumi_aws as aws

from infra.settings import SettingError, Settings
from infra.sizing import InstanceType, TaskSize, head_size, worker_size


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
        head = head_size(instance_type("headInstanceType", settings.head_instance_type, region))
        worker = worker_size(instance_type("workerInstanceType", settings.worker_instance_type, region))
        zone = availability_zone(settings, region)
        return cls(region=region, zone=zone, head=head, worker=worker, gpus=settings.worker_count * worker.gpus)


def instance_type(key: str, name: str, region: str) -> InstanceType:
    """Ask EC2 for the facts of the type that stands under a configuration key."""
    try:
        found = aws.ec2.get_instance_type(instance_type=name)
    except Exception as error:  # The SDK raises a bare Exception for whatever the provider answers.
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


def availability_zone(settings: Settings, region: str) -> str:
    """Take the zone from the settings, or the first one that offers both instance types."""
    types = {settings.head_instance_type, settings.worker_instance_type}
    offered = aws.ec2.get_instance_type_offerings(
        location_type="availability-zone", filters=[{"name": "instance-type", "values": sorted(types)}]
    )
    zones = zones_with(types, zip(offered.instance_types, offered.locations, strict=True), region)
    return choose_zone(settings, zones, region)


def zones_with(types: set[str], offerings: Iterable[tuple[str, str]], region: str) -> list[str]:
    """Sort out the region's zones that offer every one of the types, from EC2's pairs of type and location.

    Local and Wavelength Zones (us-west-2-lax-1a) are left out: they sort first, and lack NAT gateways or GPU capacity.
    """
    types_in: dict[str, set[str]] = {}
    for offered, zone in offerings:
        types_in.setdefault(zone, set()).add(offered)
    return sorted(zone for zone, found in types_in.items() if found >= types and re.fullmatch(f"{region}[a-z]", zone))


def choose_zone(settings: Settings, zones: list[str], region: str) -> str:
    """Pick the zone; SettingError where no zone, or not the one that was asked for, offers both types."""
    both = " and ".join(sorted({settings.head_instance_type, settings.worker_instance_type}))
    if not zones:
        rule = f"is not offered together with {settings.head_instance_type} in any zone of {region}"
        raise SettingError("workerInstanceType", settings.worker_instance_type, rule, "give another type or region")
    if not settings.availability_zone:
        return zones[0]
    if settings.availability_zone not in zones:
        way_out = f"give one of {', '.join(zones)}, or leave it empty to have one chosen"
        raise SettingError("availabilityZone", settings.availability_zone, f"does not offer {both}", way_out)
    return settings.availability_zone


def cause(error: Exception) -> str:
    """Find the line of a provider's answer that says why: where the answer is a list, it stands behind a bullet."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    bullets = [line.removeprefix("* ") for line in lines if line.startswith("* ")]
    return next(iter(bullets + lines), type(error).__name__)
