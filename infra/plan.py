"""What follows from the settings once AWS has been asked: place, sizes and costs, held against quotas and limits.

What cannot work is refused here, in a preview, before anything exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import pulumi_aws as aws

from infra import prices, quotas
from infra.errors import SettingError, cause
from infra.place import Place
from infra.prices import Price
from infra.settings import Settings
from infra.sizing import InstanceType, TaskSize, head_size, worker_size


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where the stack runs, what one task of each kind takes, and how many GPUs a job asks for by default.

    `hourly_usd` is what the instances cost at most, `worker_price` what one worker does; None where AWS would not say.
    """

    place: Place
    head: TaskSize
    worker: TaskSize
    gpus: int
    hourly_usd: float | None
    worker_price: Price | None

    @property
    def region(self) -> str:
        """Region of everything."""
        return self.place.region

    @classmethod
    def of(cls, settings: Settings) -> Plan:
        """Ask AWS about the settings; SettingError where they cannot work."""
        place = Place.of(settings)
        head = head_size(instance_type("headInstanceType", settings.head_instance_type, place.region))
        worker = worker_size(instance_type("workerInstanceType", settings.worker_instance_type, place.region))
        if settings.check_quotas:
            _check_quotas(settings, place.region, head, worker)
        usd = prices.look_up(place.region, {settings.head_instance_type, settings.worker_instance_type})
        return cls(
            place=place,
            head=head,
            worker=worker,
            gpus=settings.workers.job * worker.gpus,
            hourly_usd=_hourly_usd(settings, usd),
            worker_price=_price(settings.worker_instance_type, usd),
        )


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


def _check_quotas(settings: Settings, region: str, head: TaskSize, worker: TaskSize) -> None:
    quotas.check(
        region,
        quotas.Demand(key="headInstanceType", instance_type=settings.head_instance_type, count=1, vcpus=head.vcpus),
        quotas.Demand(
            key="workerInstanceType",
            instance_type=settings.worker_instance_type,
            count=settings.workers.most,
            vcpus=worker.vcpus,
        ),
    )


def _price(instance_type: str, usd: Mapping[str, float]) -> Price | None:
    return Price(instance_type=instance_type, hourly_usd=usd[instance_type]) if usd else None


def _hourly_usd(settings: Settings, usd: Mapping[str, float]) -> float | None:
    """The estimate with all workers up; SettingError where it is above the limit."""
    instances = Counter({settings.head_instance_type: 1})
    instances[settings.worker_instance_type] += settings.workers.most
    estimated = prices.estimate(usd, instances)
    prices.check(estimated, settings.max_hourly_usd, instances)
    return estimated
